// A lane's side of scattering, as writer and as target: whom it has slots of, who has slots of it, and the notices.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "regions.hpp"
#include "scattering.hpp"
#include "transfers.hpp"
#include "transport.hpp"

namespace kvferry {

// A piece whose run travels to a slot of its peer's, or has landed there and waits to be placed.
struct PackedRun {
    Piece piece;
    // The peer, as the transport knows it.
    std::uint64_t handle = 0;
    std::uint64_t slot = 0;
    std::uint64_t nbytes = 0;
};

class RunExchange {
public:
    // `finish` is told when a run is over, and what went wrong with it. `landing_bytes`: 0 = nobody gets slots.
    RunExchange(TransportAgent &agent, const EngineKey &self, std::uint64_t landing_bytes,
                std::function<void(const Piece &, const std::string &)> finish);

    // --- the target ---
    // Where runs may be placed; only memory of the host is.
    void remember(const std::vector<Region> &regions);
    void forget(const std::vector<Region> &regions);
    // Grant slots to a peer that may write.
    void meet(const EngineKey &writer, std::uint64_t handle);
    void part(const EngineKey &writer, bool fenced);
    // At the lane's end: nobody waits for what will never be placed.
    void part_all();
    // Runs so far; any thread may ask.
    std::uint64_t placed() const { return placed_; }

    // --- the writer ---
    bool has_slots_of(const Peer &peer) const { return grants_.any(peer.key); }
    bool fits(const Peer &peer, std::uint64_t nbytes) const { return grants_.fits(peer.key, nbytes); }
    std::optional<std::uint64_t> reserve(const Peer &peer, std::uint64_t nbytes) {
        return grants_.reserve(peer.key, nbytes);
    }
    void release(const Peer &peer, std::uint64_t slot) { grants_.release(peer.key, slot); }
    void retire(const Peer &peer, std::uint64_t slot) { grants_.retire(peer.key, slot); }
    // A run is complete in its slot: have it placed.
    void announce(std::uint64_t post, const PackedRun &run);
    // Runs that have landed and are not known to be placed.
    bool waits() const { return !landed_.empty(); }
    bool waits_for(std::uint64_t handle) const;
    // Of a peer whose process ended.
    void drop_dead();

    // Take what peers say; returns whether they said anything.
    bool advance();

private:
    using Clock = std::chrono::steady_clock;

    struct Waiting {
        PackedRun run;
        Clock::time_point told;
    };

    void hear(const Grant &grant) { grants_.take(grant); }
    void hear(const Landed &landed);
    void hear(const Placed &placed);
    void hear(const Revoked &revoked);
    void tell(std::uint64_t handle, const Notice &notice) { agent_.notify(handle, encode(notice)); }
    // False: it is over, since it cannot be told.
    bool tell_of(std::uint64_t post, Waiting &waiting);
    void repeat();
    void end(const PackedRun &run, const std::string &error);

    TransportAgent &agent_;
    const EngineKey self_;
    const std::function<void(const Piece &, const std::string &)> finish_;
    Grants grants_;
    std::unordered_map<std::uint64_t, Waiting> landed_;
    std::unique_ptr<Landing> landing_;
    std::atomic<std::uint64_t> placed_{0};
    RegionTable memory_;
    // The transport's name for each writer that has slots.
    std::map<EngineKey, std::uint64_t> writers_;
};

}  // namespace kvferry
