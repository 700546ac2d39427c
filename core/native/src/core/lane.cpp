#include "lane.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <set>

#include "copiers.hpp"
#include "cuda_context.hpp"

namespace kvferry {

namespace {

using namespace std::chrono_literals;

// With something in flight a lane looks after it at least so often, whatever the transport's descriptor says.
constexpr auto kNapInFlight = 10ms;

constexpr unsigned kRefusedSleeps = 256;

// For the last words to leave.
constexpr int kProgressCallsAtEnd = 16;

constexpr unsigned kCopiesBetween = 64;

// From one look at a transport without a descriptor to the next, while something is in demand but nothing moves.
constexpr auto kLookAgain = 50us;

std::string reason(const kvferry_completion &completion) {
    if (completion.status == KVFERRY_OK) return {};
    if (completion.error.text[0] != '\0') return completion.error.text;
    return "the transport reported status " + std::to_string(completion.status);
}

}  // namespace

Lane::Lane(std::size_t index, const TransportLibrary &library, const Options &options, LaneOptions limits,
           TransferBook &book, const std::vector<EventFd> &bells)
    : index_(index), limits_(limits), book_(book), bells_(bells) {
    std::promise<void> ready;
    auto result = ready.get_future();
    // By value: the thread may still be inside `set_value` when we return.
    thread_ = std::thread([this, library, options, ready = std::move(ready)]() mutable {
        run(library, options, std::move(ready));
    });
    try {
        result.get();
    } catch (...) {
        thread_.join();
        throw;
    }
}

Lane::~Lane() {
    stopping_ = true;
    wake();
    thread_.join();
}

void Lane::enqueue(std::function<void(TransportAgent &)> task) {
    {
        const std::lock_guard lock(mutex_);
        tasks_.push_back(std::move(task));
    }
    wake();
}

void Lane::remember(const std::vector<Region> &regions) {
    enqueue([this, regions](TransportAgent &) { exchange_->remember(regions); });
}

void Lane::forget(const std::vector<Region> &regions) {
    enqueue([this, regions](TransportAgent &) { exchange_->forget(regions); });
}

void Lane::meet(const Peer &peer) {
    enqueue([this, key = peer.key, handle = handle(peer)](TransportAgent &) { exchange_->meet(key, handle); });
}

void Lane::part(const Peer &peer, bool fenced) {
    enqueue([this, key = peer.key, handle = handle(peer), fenced](TransportAgent &) {
        exchange_->part(key, fenced);
        leaving_.push_back(handle);
        leave_those_that_answered();
    });
}

void Lane::set_active(bool active) {
    active_ = active;
    wake();
}

void Lane::nudge(unsigned rounds) {
    nudges_ = rounds;
    wake();
}

void Lane::run(const TransportLibrary &library, const Options &options, std::promise<void> ready) {
    ::pthread_setname_np(::pthread_self(), ("kvferry-" + library.name()).substr(0, 15).c_str());
    adopt_cuda_context();
    try {
        agent_ = std::make_unique<TransportAgent>(library, options);
        if (limits_.staging_bytes > 0) {
            staging_ = std::make_unique<Staging>(*agent_, limits_.staging_bytes, limits_.staging_slots);
        }
        exchange_ = std::make_unique<RunExchange>(
            *agent_, limits_.key, limits_.landing_bytes,
            [this](const Piece &piece, const std::string &error) { book_.finish(piece, index_, error); });
    } catch (...) {
        agent_.reset();
        exchange_.reset();
        ready.set_exception(std::current_exception());
        return;
    }
    ready.set_value();
    loop();
    exchange_->part_all();
    for (int call = 0; call < kProgressCallsAtEnd; ++call) agent_->progress();
    agent_.reset();
    staging_.reset();
    exchange_.reset();
}

void Lane::loop() {
    while (!stopping_) {
        bool moved = run_tasks();
        moved |= plan_one();
        moved |= post_one();
        // A lane that only copies asks its transport now and then: to ask may cost more than a piece's copy.
        if (!copied_ || in_flight() || ++copies_ % kCopiesBetween == 0) moved |= progress();
        rest(moved);
    }
    run_tasks();
}

bool Lane::run_tasks() {
    std::deque<std::function<void(TransportAgent &)>> tasks;
    {
        const std::lock_guard lock(mutex_);
        tasks.swap(tasks_);
    }
    for (auto &task : tasks) task(*agent_);
    return !tasks.empty();
}

bool Lane::plan_one() {
    const auto transfer = book_.take_unplanned();
    if (transfer == nullptr) return false;
    try {
        book_.planned(transfer, plan_of(*transfer));
        for (const EventFd &bell : bells_) bell.signal();
    } catch (const std::exception &error) {
        book_.fail(transfer, error.what());
    }
    return true;
}

Plan Lane::plan_of(const Transfer &transfer) const {
    std::vector<Segment> segments = transfer.segments;
    if (const auto &blocks = transfer.order) {
        const Order order = staging_ != nullptr && on_host_ ? Order::kDestination : Order::kSource;
        segments = plan(*blocks->map, blocks->src, blocks->dst, order);
    }
    Plan plan;
    const MappedRegions &mapped = transfer.peer->mapped;
    if (!mapped.empty() && on_host_) {
        const auto posted = std::stable_partition(segments.begin(), segments.end(), [&](const Segment &segment) {
            return mapped.find(segment.dst, segment.nbytes) != nullptr;
        });
        plan.segments.assign(segments.begin(), posted);
        segments.erase(segments.begin(), posted);
        for (Segment &segment : plan.segments) {
            segment.dst = reinterpret_cast<std::uint64_t>(mapped.find(segment.dst, segment.nbytes));
            plan.copied_bytes += segment.nbytes;
        }
        plan.segments = split_long(std::move(plan.segments), limits_.copied_bytes);
        plan.copies = plan.segments.size();
    }
    plan.scatters = exchange_->has_slots_of(*transfer.peer) && staging_ != nullptr && on_host_ &&
                    transfer.peer->on_host && is_worth_scattering(segments, limits_.gather_below, limits_.scatter_below);
    segments = split_long(std::move(segments), limits_.piece_bytes);
    plan.segments.insert(plan.segments.end(), segments.begin(), segments.end());
    return plan;
}

bool Lane::post_one() {
    copied_ = false;
    const auto piece = book_.take(index_);
    if (!piece) return false;
    std::string error;
    if ((copied_ = piece->is_copy)) {
        error = copy(*piece);
    } else if (piece->transfer->peer->process.readable()) {
        // A transport that writes to a process id must not meet the stranger that has it next.
        error = kProcessEnded;
    } else {
        try {
            if (post(*piece)) return true;
            book_.put_back(*piece, index_);
            return false;
        } catch (const std::exception &refused) {
            error = refused.what();
        }
    }
    book_.finish(*piece, index_, error);
    return true;
}

bool Lane::post(const Piece &piece) {
    Posted posted{piece, std::nullopt, std::nullopt};
    std::optional<Staging::Gathered> gathered;
    if (may_scatter(piece)) {
        if (!(gathered = pack(posted))) return false;
    } else if (staging_ != nullptr && on_host_) {
        gathered = staging_->gather(piece.segments(), limits_.gather_below);
    }
    if (gathered) posted.slot = gathered->slot;
    const auto give_back = [&] {
        if (posted.slot) staging_->release(*posted.slot);
        if (posted.run) exchange_->release(*piece.transfer->peer, posted.run->slot);
    };
    try {
        const auto segments = gathered ? std::span<const Segment>(gathered->segments) : piece.segments();
        if (!agent_->post(handle(*piece.transfer->peer), next_post_, segments)) {
            give_back();
            return false;
        }
    } catch (...) {
        give_back();
        throw;
    }
    posted_.emplace(next_post_++, std::move(posted));
    return true;
}

bool Lane::may_scatter(const Piece &piece) const {
    if (!piece.transfer->scatters || staging_ == nullptr || !on_host_) return false;
    const std::uint64_t nbytes = piece.range.nbytes + list_bytes(piece.segments().size());
    return staging_->fits(nbytes) && exchange_->fits(*piece.transfer->peer, nbytes);
}

// Nothing if all slots are taken, here or at the target.
std::optional<Staging::Gathered> Lane::pack(Posted &posted) {
    const Peer &peer = *posted.piece.transfer->peer;
    const auto segments = posted.piece.segments();
    const std::uint64_t nbytes = posted.piece.range.nbytes + list_bytes(segments.size());
    const auto slot = exchange_->reserve(peer, nbytes);
    if (!slot) return std::nullopt;
    auto packed = staging_->pack(segments, *slot);
    if (packed) {
        posted.run = PackedRun{posted.piece, handle(peer), *slot, nbytes};
    } else {
        exchange_->release(peer, *slot);
    }
    return packed;
}

bool Lane::progress() {
    const auto completions = agent_->progress();
    for (const auto &completion : completions) settle(completion);
    const bool heard = exchange_->advance();
    ++rounds_;
    leave_those_that_answered();
    return heard || !completions.empty();
}

void Lane::leave_those_that_answered() {
    std::erase_if(leaving_, [this](std::uint64_t handle) {
        if (exchange_->waits_for(handle)) return false;
        agent_->disconnect(handle, false);
        return true;
    });
}

void Lane::settle(const kvferry_completion &completion) {
    const auto found = posted_.find(completion.post);
    if (found == posted_.end()) return;
    const Posted posted = std::move(found->second);
    posted_.erase(found);
    if (posted.slot) staging_->release(*posted.slot);
    std::string error = reason(completion);
    if (posted.run && error.empty() && !book_.is_stopped(*posted.piece.transfer)) {
        exchange_->announce(completion.post, *posted.run);
        return;
    }
    if (posted.run && !error.empty()) exchange_->retire(*posted.piece.transfer->peer, posted.run->slot);
    if (posted.run && error.empty()) {
        exchange_->release(*posted.piece.transfer->peer, posted.run->slot);
        // What has landed and is not announced is not there.
        error = "stopped";
    }
    book_.finish(posted.piece, index_, error);
}

bool Lane::in_flight() const { return !posted_.empty() || exchange_->waits(); }

bool Lane::in_demand() const { return in_flight() || active_ || nudges_ > 0; }

void Lane::rest(bool moved) {
    const bool working = in_flight() || book_.has_work();
    if (nudges_ > 0) --nudges_;
    if (moved) {
        last_move_ = Clock::now();
        refused_sleeps_ = 0;
        return;
    }
    if (!working && !in_demand()) {
        sleep(-1ms);
        return;
    }
    const int fd = agent_->wakeup_fd();
    if (fd == KVFERRY_POLLS_POLITELY || nudges_ > 0 || Clock::now() - last_move_ < limits_.spin) {
        // Two workers of one machine may share a core: whoever has bytes to move goes first.
        ::sched_yield();
        return;
    }
    if (fd < 0) {
        // A target that spins takes its writer's core, and half of its speed with it.
        std::this_thread::sleep_for(kLookAgain);
    } else {
        sleep(working ? kNapInFlight : -1ms);
    }
    if (in_flight()) forget_dead_peers();
}

void Lane::sleep(std::chrono::milliseconds longest) {
    int transport = agent_->wakeup_fd();
    if (transport >= 0 && !agent_->arm()) {
        // A transport that always has work and never gets anywhere must not cost a core.
        if (++refused_sleeps_ < kRefusedSleeps) return;
        transport = -1;
        longest = kNapInFlight;
    }
    refused_sleeps_ = 0;
    pollfd entries[2] = {{bells_[index_].get(), POLLIN, 0}, {transport, POLLIN, 0}};
    ::poll(entries, 2, static_cast<int>(longest.count()));
    bells_[index_].clear();
}

void Lane::forget_dead_peers() {
    std::set<std::shared_ptr<Peer>> dead;
    for (const auto &[post, posted] : posted_) {
        const auto &peer = posted.piece.transfer->peer;
        if (peer->process.readable()) dead.insert(peer);
    }
    for (const auto &peer : dead) {
        book_.leave(peer, kProcessEnded);
        agent_->disconnect(handle(*peer), true);
    }
    exchange_->drop_dead();
}

}  // namespace kvferry
