// One thread that owns one agent of the transport: it plans, posts, makes progress, and sleeps when it is idle.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "file_descriptor.hpp"
#include "run_exchange.hpp"
#include "staging.hpp"
#include "transfers.hpp"
#include "transport.hpp"

namespace kvferry {

struct LaneOptions {
    // How long a lane with work in flight asks again and again before it sleeps on the transport's descriptor.
    std::chrono::microseconds spin{50};
    std::uint64_t piece_bytes = 8u << 20;
    std::uint64_t copied_bytes = 2u << 20;
    // 0 = none.
    std::uint64_t staging_bytes = 0;
    std::size_t staging_slots = 4;
    // Segments that are at least so long go straight from where they are.
    std::uint64_t gather_below = 0;
    // Where puts would be shorter than this, the target scatters.
    std::uint64_t scatter_below = 0;
    // 0 = nothing is scattered here.
    std::uint64_t landing_bytes = 0;
    EngineKey key{};
};

// A piece on its way, the staging slot that it leaves from, and the one of the target's that it goes to.
struct Posted {
    Piece piece;
    std::optional<std::size_t> slot;
    std::optional<PackedRun> run;
};

class Lane {
public:
    // Starts the thread and makes the agent on it. Raises what the transport raised.
    // `bells` wake the lanes, by index; they and `book` outlive all lanes.
    Lane(std::size_t index, const TransportLibrary &library, const Options &options, LaneOptions limits,
         TransferBook &book, const std::vector<EventFd> &bells);
    ~Lane();
    Lane(const Lane &) = delete;

    // Run `task` on the lane's thread and wait for what it returns or raises.
    template <typename Task>
    auto call(Task task) {
        std::packaged_task<std::invoke_result_t<Task, TransportAgent &>(TransportAgent &)> packaged(std::move(task));
        auto result = packaged.get_future();
        enqueue([packaged = std::make_shared<decltype(packaged)>(std::move(packaged))](TransportAgent &agent) {
            (*packaged)(agent);
        });
        return result.get();
    }

    // Run it soon; nobody waits.
    void enqueue(std::function<void(TransportAgent &)> task);
    void wake() const { bells_[index_].signal(); }
    // As a passive target: writes to us are under way.
    void set_active(bool active);
    // Device memory is not ours to copy: from now on nothing is gathered, nor written but by the transport.
    void stop_copying() { on_host_ = false; }
    // Make progress this many times, awake.
    void nudge(unsigned rounds);
    // Memory that may be written to here, and peers that may: what follows is done soon, in order.
    void remember(const std::vector<Region> &regions);
    void forget(const std::vector<Region> &regions);
    void meet(const Peer &peer);
    // What is in flight to it comes to its end. `fenced`: it never writes here again.
    void part(const Peer &peer, bool fenced);
    // How often it has made progress.
    std::uint64_t rounds() const { return rounds_; }
    // Runs that it has put into place, as a target.
    std::uint64_t placed() const { return exchange_->placed(); }

private:
    using Clock = std::chrono::steady_clock;

    void run(const TransportLibrary &library, const Options &options, std::promise<void> ready);
    void loop();
    bool run_tasks();
    bool plan_one();
    Plan plan_of(const Transfer &transfer) const;
    bool post_one();
    bool post(const Piece &piece);
    std::optional<Staging::Gathered> pack(Posted &posted);
    bool may_scatter(const Piece &piece) const;
    bool progress();
    void leave_those_that_answered();
    void settle(const kvferry_completion &completion);
    void rest(bool moved);
    bool in_flight() const;
    bool in_demand() const;
    void sleep(std::chrono::milliseconds longest);
    void forget_dead_peers();
    std::uint64_t handle(const Peer &peer) const { return peer.handles[index_]; }

    const std::size_t index_;
    const LaneOptions limits_;
    TransferBook &book_;
    const std::vector<EventFd> &bells_;
    std::mutex mutex_;
    std::deque<std::function<void(TransportAgent &)>> tasks_;
    std::atomic<bool> stopping_{false};
    std::atomic<bool> active_{false};
    std::atomic<bool> on_host_{true};
    std::atomic<unsigned> nudges_{0};
    std::atomic<std::uint64_t> rounds_{0};

    // Of the lane's thread alone.
    std::unique_ptr<TransportAgent> agent_;
    std::unique_ptr<Staging> staging_;
    std::unique_ptr<RunExchange> exchange_;
    std::unordered_map<std::uint64_t, Posted> posted_;
    // Peers that we have left, but whose answers we wait for.
    std::vector<std::uint64_t> leaving_;
    std::uint64_t next_post_ = 1;
    Clock::time_point last_move_{};
    // Times in a row that the transport was not ready to sleep although nothing moved.
    unsigned refused_sleeps_ = 0;
    // Whether the last piece was copied, and how many were so far.
    bool copied_ = false;
    unsigned copies_ = 0;

    std::thread thread_;
};

}  // namespace kvferry
