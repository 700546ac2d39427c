#include "agent.hpp"

#include <cstdlib>
#include <memory>
#include <random>

namespace kvferry::nixl {

namespace {

// Larger than any version's configuration; all zero is what we want of each: no threads, no telemetry, no locks.
constexpr std::size_t kConfigBytes = 256;

struct Free {
    void operator()(void *memory) const { std::free(memory); }
};

std::string unique_name() {
    std::random_device random;
    std::string name = "kvferry";
    for (int word = 0; word < 4; ++word) name += "-" + std::to_string(random());
    return name;
}

// A descriptor list that frees itself.
struct List {
    const Api &api;
    Handle handle = nullptr;

    List(const Api &all, int kind) : api(all) {
        require(api.create_list(static_cast<unsigned>(kind), &handle), "NIXL makes no descriptor list");
    }
    ~List() { api.destroy_list(handle); }
    List(const List &) = delete;

    void add(std::uint64_t address, std::uint64_t nbytes, int device) {
        require(api.add_to_list(handle, address, nbytes, static_cast<std::uint64_t>(device)), "NIXL's list is full");
    }
};

const kvferry_region *holder(const std::vector<kvferry_region> &regions, std::uint64_t address) {
    for (const auto &region : regions) {
        if (address - region.address < region.nbytes) return &region;
    }
    throw Error(KVFERRY_INVALID, "the peer has not registered that memory");
}

}  // namespace

NixlAgent::NixlAgent(const OptionMap &options) : api_(Api::get()) {
    reject_unknown(options, {});
    const std::vector<std::uint64_t> config(kConfigBytes / sizeof(std::uint64_t));
    require(api_.create_agent(unique_name().c_str(), config.data(), &agent_), "NIXL makes no agent");
    Handle memories = nullptr, params = nullptr, backend = nullptr;
    try {
        require(api_.plugin_params(agent_, "UCX", &memories, &params), "this NIXL has no UCX plugin");
        require(api_.create_backend(agent_, "UCX", params, &backend),
                "NIXL's UCX plugin does not start; does UCX_TLS leave it a transport?");
        require(api_.create_options(&options_), "NIXL makes no options");
        require(api_.add_backend(options_, backend), "NIXL refuses its own plugin");
    } catch (...) {
        api_.destroy_agent(agent_);
        throw;
    }
}

NixlAgent::~NixlAgent() {
    for (const Request &request : requests_) end(request, kInProgress);
    for (const auto &[id, peer] : peers_) api_.forget_metadata(agent_, peer.name.c_str());
    for (const auto &[id, region] : regions_) {
        api_.deregister_memory(agent_, region.list, options_);
        api_.destroy_memory(region.list);
    }
    api_.destroy_agent(agent_);
}

std::uint64_t NixlAgent::register_memory(const kvferry_region &region) {
    Handle list = nullptr;
    require(api_.create_memory(static_cast<unsigned>(region.device_kind), &list), "NIXL makes no memory list");
    int status = api_.add_memory(list, region.address, region.nbytes, static_cast<std::uint64_t>(region.device), "", 0);
    if (status == kSuccess) status = api_.register_memory(agent_, list, options_);
    if (status != kSuccess) api_.destroy_memory(list);
    require(status, "NIXL cannot register " + std::to_string(region.nbytes) + " bytes");
    regions_.emplace(++last_, Region{region, list});
    return last_;
}

void NixlAgent::deregister_memory(std::uint64_t registration) {
    const auto found = regions_.find(registration);
    if (found == regions_.end()) throw Error(KVFERRY_INVALID, "NIXL holds no such registration");
    const Handle list = found->second.list;
    regions_.erase(found);
    const int status = api_.deregister_memory(agent_, list, options_);
    api_.destroy_memory(list);
    require(status, "NIXL cannot deregister");
}

// --- peers ------------------------------------------------------------------------------------------------------

std::vector<std::uint8_t> NixlAgent::describe() const {
    void *raw = nullptr;
    std::size_t nbytes = 0;
    require(api_.local_metadata(agent_, &raw, &nbytes), "NIXL has no metadata");
    const std::unique_ptr<void, Free> metadata(raw);
    ByteWriter out;
    out.bytes({static_cast<const std::uint8_t *>(raw), nbytes});
    out.number(static_cast<std::uint32_t>(regions_.size()));
    for (const auto &[id, region] : regions_) out.number(region.region);
    return out.take();
}

std::uint64_t NixlAgent::connect(std::span<const std::uint8_t> descriptor) {
    ByteReader in(descriptor);
    const auto metadata = in.bytes();
    Peer peer{{}, {metadata.begin(), metadata.end()}, std::vector<kvferry_region>(in.count(sizeof(kvferry_region)))};
    for (auto &region : peer.regions) region = in.number<kvferry_region>();
    in.end();
    peer.name = load(peer.metadata);
    peers_.emplace(++last_, std::move(peer));
    return last_;
}

std::string NixlAgent::load(const std::vector<std::uint8_t> &metadata) {
    char *raw = nullptr;
    require(api_.load_metadata(agent_, metadata.data(), metadata.size(), &raw), "NIXL refuses the peer's metadata");
    const std::unique_ptr<char, Free> name(raw);
    return name.get();
}

void NixlAgent::disconnect(std::uint64_t id, bool dead) {
    const auto found = peers_.find(id);
    if (found == peers_.end()) return;
    found->second.left = true;
    if (dead) {
        std::erase_if(requests_, [&](const Request &request) {
            if (request.peer != id) return false;
            ended_.emplace_back(request.post, end(request, kInProgress));
            return true;
        });
    }
    if (const auto again = peers_.find(id); again != peers_.end() && again->second.in_flight == 0) {
        api_.forget_metadata(agent_, again->second.name.c_str());
        peers_.erase(again);
    }
}

NixlAgent::Peer &NixlAgent::peer(std::uint64_t id) {
    const auto found = peers_.find(id);
    if (found == peers_.end() || found->second.left) throw Error(KVFERRY_INVALID, "NIXL has no such peer");
    Peer &peer = found->second;
    if (peer.broken && peer.in_flight == 0) {
        api_.forget_metadata(agent_, peer.name.c_str());
        peer.name = load(peer.metadata);
        peer.broken = false;
    }
    return peer;
}

// --- transfers --------------------------------------------------------------------------------------------------

kvferry_status NixlAgent::post(std::uint64_t id, std::uint64_t post, std::span<const kvferry_segment> segments) {
    Peer &target = peer(id);
    const Request request{post, id, make_request(target, segments)};
    ++target.in_flight;
    const int status = api_.post(agent_, request.handle, nullptr);
    if (status == kInProgress) {
        requests_.push_back(request);
    } else {
        ended_.emplace_back(post, end(request, status));
    }
    return KVFERRY_OK;
}

Handle NixlAgent::make_request(const Peer &peer, std::span<const kvferry_segment> segments) {
    std::vector<kvferry_region> ours;
    for (const auto &[id, region] : regions_) ours.push_back(region.region);
    const kvferry_region *from = holder(ours, segments.front().src);
    const kvferry_region *to = holder(peer.regions, segments.front().dst);
    List here(api_, from->device_kind), there(api_, to->device_kind);
    for (const auto &segment : segments) {
        here.add(segment.src, segment.nbytes, from->device);
        there.add(segment.dst, segment.nbytes, to->device);
    }
    Handle request = nullptr;
    require(api_.create_request(agent_, kWrite, here.handle, there.handle, peer.name.c_str(), &request, options_),
            "NIXL refuses the transfer");
    return request;
}

// Give a request back and count it off; returns the status to report.
int NixlAgent::end(const Request &request, int status) {
    api_.release(agent_, request.handle);
    api_.destroy_request(request.handle);
    Peer &peer = peers_.at(request.peer);
    --peer.in_flight;
    peer.broken |= status != kSuccess;
    return status;
}

std::size_t NixlAgent::progress(std::span<kvferry_completion> completions) {
    receive_notices();
    std::erase_if(requests_, [&](const Request &request) {
        const int status = api_.status(agent_, request.handle);
        if (status == kInProgress) return false;
        ended_.emplace_back(request.post, end(request, status));
        return true;
    });
    std::size_t count = 0;
    for (; count < completions.size() && count < ended_.size(); ++count) {
        const auto &[post, status] = ended_[count];
        completions[count].post = post;
        completions[count].status = status == kSuccess      ? KVFERRY_OK
                                    : status == kInProgress ? KVFERRY_CANCELLED
                                                            : KVFERRY_UNREACHABLE;
        copy_text(completions[count].error, status == kSuccess      ? ""
                                            : status == kInProgress ? "taken back"
                                                                    : "NIXL reports status " + std::to_string(status));
    }
    ended_.erase(ended_.begin(), ended_.begin() + static_cast<std::ptrdiff_t>(count));
    std::erase_if(peers_, [&](const auto &entry) {
        const bool gone = entry.second.left && entry.second.in_flight == 0;
        if (gone) api_.forget_metadata(agent_, entry.second.name.c_str());
        return gone;
    });
    return count;
}

// --- notices ----------------------------------------------------------------------------------------------------

void NixlAgent::notify(std::uint64_t id, std::span<const std::uint8_t> message) {
    require(api_.send_notice(agent_, peer(id).name.c_str(), message.data(), message.size(), options_),
            "NIXL refuses the notice");
}

void NixlAgent::receive_notices() {
    Handle map = nullptr;
    require(api_.create_notices(&map), "NIXL makes no list of notices");
    const auto destroy = [this](void *handle) { api_.destroy_notices(handle); };
    const std::unique_ptr<void, decltype(destroy)> kept(map, destroy);
    std::size_t senders = 0;
    // This is also what makes progress, for the writer and for the target.
    if (api_.receive_notices(agent_, map, options_) != kSuccess || api_.senders(map, &senders) != kSuccess) return;
    for (std::size_t index = 0; index < senders; ++index) {
        const char *name = nullptr;
        std::size_t count = 0;
        require(api_.sender(map, index, &name), "NIXL names no sender");
        require(api_.count_of(map, name, &count), "NIXL counts no notices");
        for (std::size_t each = 0; each < count; ++each) {
            const void *data = nullptr;
            std::size_t nbytes = 0;
            require(api_.notice(map, name, each, &data, &nbytes), "NIXL loses a notice");
            const auto *bytes = static_cast<const std::uint8_t *>(data);
            notices_.emplace_back(bytes, bytes + nbytes);
        }
    }
}

}  // namespace kvferry::nixl
