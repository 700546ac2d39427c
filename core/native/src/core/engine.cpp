#include "engine.hpp"

#include <algorithm>
#include <random>
#include <sstream>
#include <thread>

#include "cuda_context.hpp"

namespace kvferry {

namespace {

using namespace std::chrono_literals;

// For writes that a transport has begun and that can only be waited for.
constexpr auto kDeregisterPatience = 10s;

EngineKey random_key() {
    std::random_device random;
    const auto word = [&] { return static_cast<std::uint64_t>(random()) << 32 | random(); };
    return {word(), word()};
}

std::string hexadecimal(std::uint64_t number) {
    std::ostringstream text;
    text << "0x" << std::hex << number;
    return text.str();
}

void require_registered(const RegionTable &memory, std::uint64_t address, std::uint64_t nbytes, const char *whose) {
    if (memory.covers(address, nbytes)) return;
    throw Error(KVFERRY_INVALID, std::string(whose) + " has not registered " + std::to_string(nbytes) + " bytes at " +
                                     hexadecimal(address));
}

// For what is already failing, on a thread where nobody catches.
void give_back(TransportAgent &agent, std::uint64_t registration) noexcept {
    try {
        agent.deregister_memory(registration);
    } catch (const Error &) {
        // The agent's end takes it.
    }
}

std::uint64_t extent(std::uint64_t stride, std::uint64_t blocks) {
    std::uint64_t nbytes = 0;
    if (__builtin_mul_overflow(stride, blocks, &nbytes)) throw Error(KVFERRY_INVALID, "a pool is larger than memory");
    return nbytes;
}

bool reads_within(const RegionTable &memory, const Transfer &transfer) {
    if (transfer.order) {
        const auto &pools = transfer.order->map->pools();
        return std::all_of(pools.begin(), pools.end(), [&](const PoolPair &pool) {
            return memory.covers(pool.src_base, extent(pool.src_stride, pool.src_blocks));
        });
    }
    return std::all_of(transfer.segments.begin(), transfer.segments.end(), [&](const Segment &segment) {
        return memory.covers(segment.src, segment.nbytes);
    });
}

std::size_t helpers(const EngineOptions &options) {
    const std::size_t automatic = std::thread::hardware_concurrency() > 1 ? 2 : 1;
    const std::size_t wanted = options.copy_threads > 0 ? options.copy_threads : automatic;
    return wanted - std::min(wanted, options.lanes);
}

}  // namespace

Engine::Engine(TransportLibrary library, const EngineOptions &options)
    : library_(library), key_(random_key()), book_(options.pieces), bells_(options.lanes), helpers_(helpers(options)),
      map_peers_(options.map_peers) {
    if (options.lanes == 0) throw Error(KVFERRY_INVALID, "an engine needs at least one lane");
    const PieceLimits &pieces = options.pieces;
    if (pieces.nbytes == 0 || pieces.segments == 0 || pieces.in_flight == 0) {
        throw Error(KVFERRY_INVALID, "a piece has at least one byte and one segment, and one of them may be posted");
    }
    const LaneOptions limits{options.spin, options.pieces.nbytes, options.pieces.copied_bytes(), options.staging_bytes, options.pieces.in_flight,
                             options.gather_below, options.scatter_below,
                             options.scatter_below > 0 ? options.staging_bytes : 0, key_};
    for (std::size_t index = 0; index < options.lanes; ++index) {
        lanes_.push_back(std::make_unique<Lane>(index, library_, options.transport, limits, book_, bells_));
    }
}

void Engine::close() {
    const std::lock_guard lock(mutex_);
    copiers_.reset();
    lanes_.clear();
    peers_.clear();
    registrations_.clear();
}

void Engine::require_open() const {
    if (lanes_.empty()) throw Error(KVFERRY_INVALID, "the engine is closed");
}

// --- memory and peers -------------------------------------------------------------------------------------------

std::uint64_t Engine::register_memory(const std::vector<Region> &regions) {
    const std::lock_guard lock(mutex_);
    require_open();
    Registration registration{regions, {}};
    for (const auto &lane : lanes_) {
        try {
            registration.handles.push_back(register_on(*lane, regions));
        } catch (...) {
            for (std::size_t index = 0; index < registration.handles.size(); ++index) {
                for (auto handle : registration.handles[index]) {
                    lanes_[index]->enqueue([handle](TransportAgent &agent) { give_back(agent, handle); });
                }
            }
            throw;
        }
    }
    for (const auto &lane : lanes_) lane->remember(regions);
    for (const Region &region : regions) {
        memory_.add(region);
        if (const auto backing = find_backing(region)) backings_[{region.address, region.nbytes}] = *backing;
        if (region.device_kind != KVFERRY_CPU) {
            for (const auto &lane : lanes_) lane->stop_copying();
        }
    }
    registrations_.emplace(next_id_, std::move(registration));
    return next_id_++;
}

Engine::LaneRegistrations Engine::register_on(Lane &lane, const std::vector<Region> &regions) {
    return lane.call([&](TransportAgent &agent) {
        LaneRegistrations handles;
        try {
            for (const Region &region : regions) {
                if (region.device_kind == KVFERRY_CUDA) adopt_cuda_context(region.device);
                handles.push_back(agent.register_memory(region));
            }
        } catch (...) {
            for (auto handle : handles) give_back(agent, handle);
            throw;
        }
        return handles;
    });
}

void Engine::deregister_memory(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    if (lanes_.empty()) return;
    const auto found = registrations_.find(id);
    if (found == registrations_.end()) throw Error(KVFERRY_INVALID, "there is no registration " + std::to_string(id));
    RegionTable left = memory_;
    for (const Region &region : found->second.regions) left.remove(region);
    const auto reads_it = [&](const Transfer &transfer) { return !reads_within(left, transfer); };
    if (!book_.stop_all(reads_it, "its memory was deregistered", kDeregisterPatience)) {
        throw Error(KVFERRY_INVALID, "a write from there is still under way: deregister once its completion has come");
    }
    const Registration registration = std::move(found->second);
    registrations_.erase(found);
    memory_ = std::move(left);
    for (const Region &region : registration.regions) backings_.erase({region.address, region.nbytes});
    for (std::size_t index = 0; index < lanes_.size(); ++index) {
        lanes_[index]->forget(registration.regions);
        lanes_[index]->call([&](TransportAgent &agent) {
            for (auto handle : registration.handles[index]) agent.deregister_memory(handle);
        });
    }
}

Bytes Engine::descriptor() {
    const std::lock_guard lock(mutex_);
    require_open();
    Descriptor descriptor{library_.name(), key_, memory_.all(), {}, {}};
    for (const Region &region : descriptor.regions) {
        const auto found = backings_.find({region.address, region.nbytes});
        descriptor.backings.push_back(found == backings_.end() ? std::nullopt : std::optional(found->second));
    }
    for (const auto &lane : lanes_) {
        descriptor.lanes.push_back(lane->call([](TransportAgent &agent) { return agent.describe(); }));
    }
    return encode(descriptor);
}

PeerId Engine::connect(std::span<const std::uint8_t> body, FileDescriptor process) {
    const std::lock_guard lock(mutex_);
    require_open();
    const Descriptor descriptor = decode(body);
    if (descriptor.transport != library_.name()) {
        throw Error(KVFERRY_INVALID, "the peer speaks " + descriptor.transport + ", this engine " + library_.name());
    }
    if (descriptor.key == key_) throw Error(KVFERRY_INVALID, "an engine cannot be its own peer");
    for (const auto &[id, known] : peers_) {
        if (known->key == descriptor.key) return id;
    }
    auto peer = std::make_shared<Peer>();
    peer->key = descriptor.key;
    peer->process = std::move(process);
    peer->in_flight.resize(lanes_.size());
    for (std::size_t index = 0; index < descriptor.regions.size(); ++index) {
        peer->regions.add(descriptor.regions[index]);
        peer->on_host &= descriptor.regions[index].device_kind == KVFERRY_CPU;
        if (const auto &backing = descriptor.backings[index]; backing && map_peers_) {
            peer->mapped.map(peer->process, descriptor.regions[index], *backing);
        }
    }
    connect_lanes(*peer, descriptor.lanes);
    if (!peer->mapped.empty()) start_copiers();
    // What lanes tell each other needs pairs of them.
    if (descriptor.lanes.size() == lanes_.size()) {
        for (const auto &lane : lanes_) lane->meet(*peer);
    }
    peer->id = next_id_++;
    peers_.emplace(peer->id, peer);
    return peer->id;
}

void Engine::start_copiers() {
    if (!copiers_) copiers_.emplace(book_);
    copiers_->start(helpers_);
}

void Engine::connect_lanes(Peer &peer, const std::vector<Bytes> &parts) {
    try {
        for (std::size_t index = 0; index < lanes_.size(); ++index) {
            // Sides may have different numbers of lanes.
            const Bytes &part = parts[index % parts.size()];
            peer.handles.push_back(lanes_[index]->call([&](TransportAgent &agent) { return agent.connect(part); }));
        }
    } catch (...) {
        disconnect_lanes(peer);
        throw;
    }
}

void Engine::disconnect_lanes(const Peer &peer) {
    for (std::size_t index = 0; index < peer.handles.size(); ++index) {
        lanes_[index]->enqueue(
            [handle = peer.handles[index]](TransportAgent &agent) { agent.disconnect(handle, false); });
    }
}

void Engine::disconnect(PeerId id, bool fenced) {
    const std::lock_guard lock(mutex_);
    const auto found = peers_.find(id);
    if (found == peers_.end()) return;
    const auto peer = std::move(found->second);
    peers_.erase(found);
    book_.leave(peer, "disconnected");
    for (const auto &lane : lanes_) lane->part(*peer, fenced);
}

bool Engine::maps(PeerId id) const {
    const std::lock_guard lock(mutex_);
    return !peer(id)->mapped.empty();
}

const std::shared_ptr<Peer> &Engine::peer(PeerId id) const {
    const auto found = peers_.find(id);
    if (found == peers_.end()) throw Error(KVFERRY_INVALID, "there is no peer " + std::to_string(id));
    return found->second;
}

// --- transfers --------------------------------------------------------------------------------------------------

TransferId Engine::submit(PeerId id, std::vector<Segment> segments) {
    const std::lock_guard lock(mutex_);
    require_open();
    auto transfer = std::make_shared<Transfer>();
    transfer->peer = peer(id);
    std::erase_if(segments, [](const Segment &segment) { return segment.nbytes == 0; });
    for (const Segment &segment : segments) check(*transfer->peer, segment);
    transfer->segments = std::move(segments);
    return begin(std::move(transfer));
}

TransferId Engine::submit_blocks(PeerId id, BlockOrder order) {
    const std::lock_guard lock(mutex_);
    require_open();
    auto transfer = std::make_shared<Transfer>();
    transfer->peer = peer(id);
    check(*transfer->peer, *order.map);
    transfer->order = std::move(order);
    return begin(std::move(transfer));
}

TransferId Engine::begin(std::shared_ptr<Transfer> transfer) {
    if (transfer->peer->process.readable()) throw Error(KVFERRY_UNREACHABLE, "the peer is gone: its process ended");
    const TransferId id = transfer->id = next_id_++;
    book_.submit(std::move(transfer));
    for (const auto &lane : lanes_) lane->wake();
    return id;
}

void Engine::check(const Peer &peer, const Segment &segment) const {
    require_registered(memory_, segment.src, segment.nbytes, "this side");
    require_registered(peer.regions, segment.dst, segment.nbytes, "the peer");
}

void Engine::check(const Peer &peer, const BlockMap &map) const {
    for (const PoolPair &pool : map.pools()) {
        require_registered(memory_, pool.src_base, extent(pool.src_stride, pool.src_blocks), "this side");
        require_registered(peer.regions, pool.dst_base, extent(pool.dst_stride, pool.dst_blocks), "the peer");
    }
}

void Engine::set_active(bool active) {
    for (const auto &lane : lanes_) lane->set_active(active);
}

void Engine::nudge(unsigned rounds) {
    for (const auto &lane : lanes_) lane->nudge(rounds);
}

std::uint64_t Engine::rounds() const {
    std::uint64_t fewest = UINT64_MAX;
    for (const auto &lane : lanes_) fewest = std::min(fewest, lane->rounds());
    return fewest;
}

std::uint64_t Engine::placed() const {
    std::uint64_t all = 0;
    for (const auto &lane : lanes_) all += lane->placed();
    return all;
}

}  // namespace kvferry
