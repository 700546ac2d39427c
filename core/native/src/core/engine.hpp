// The front of a native agent: what any thread may call. It keeps peers and memory, and hands transfers to its lanes.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "copiers.hpp"
#include "descriptor.hpp"
#include "lane.hpp"
#include "transfers.hpp"

namespace kvferry {

struct EngineOptions {
    // Threads, each with an agent of the transport: a transfer's pieces are shared out among them.
    std::size_t lanes = 1;
    PieceLimits pieces;
    // Each lane's buffer for gathering segments shorter than `gather_below`; 0 = none.
    std::uint64_t staging_bytes = 0;
    // 32 KiB: up to 16 KiB gathering won everywhere, at 64 KiB nowhere by much (benchmarks/gathering.py).
    std::uint64_t gather_below = 32 << 10;
    // Where puts would be shorter than this on average (16 times this in a transfer of 16 MiB or more), they go as one
    // run to a buffer of the target's, as large as the staging buffer, and are scattered there; 0 = never. 8 KiB:
    // benchmarks/scattering.py.
    std::uint64_t scatter_below = 8 << 10;
    std::chrono::microseconds spin{50};
    // Write by copying where the peer is of this host and its memory can be mapped; the transport is for the rest.
    bool map_peers = true;
    // Threads that copy at once, lanes among them; 0 = two, where there is more than one core.
    std::size_t copy_threads = 0;
    // For the transport.
    Options transport;
};

class Engine {
public:
    Engine(TransportLibrary library, const EngineOptions &options);
    ~Engine() { close(); }

    std::string transport() const { return library_.name(); }
    std::string version() const { return library_.version(); }

    // --- memory and peers: these wait for the lanes, which may be busy with a piece ---
    std::uint64_t register_memory(const std::vector<Region> &regions);
    // Ends what would be read from there, and raises, with the registration as it was, if that takes too long.
    void deregister_memory(std::uint64_t registration);
    Bytes descriptor();
    // `process`: a pidfd of the peer, which the engine keeps; -1 = not a process of this host.
    PeerId connect(std::span<const std::uint8_t> descriptor, FileDescriptor process);
    // `fenced`: it is proven that the peer never writes here again.
    void disconnect(PeerId peer, bool fenced = false);
    // Whether writes to a peer are copies, at least to some of its memory.
    bool maps(PeerId peer) const;

    // --- transfers: these never wait ---
    // Raises if an address is not registered, at either end, or the peer is gone; then nothing is posted.
    TransferId submit(PeerId peer, std::vector<Segment> segments);
    // A block list that cannot be planned is a failed completion.
    TransferId submit_blocks(PeerId peer, BlockOrder order);
    bool cancel(TransferId id, const std::string &reason) { return book_.stop(id, reason); }
    std::optional<std::uint64_t> bytes_done(TransferId id) const { return book_.bytes_done(id); }
    std::vector<Completion> collect() { return book_.collect(); }
    int wakeup_fd() const { return book_.wakeup_fd(); }

    void set_active(bool active);
    void nudge(unsigned rounds);
    // Progress calls so far of the lane that made the fewest.
    std::uint64_t rounds() const;
    // Runs of short segments that were put into place here.
    std::uint64_t placed() const;
    // End the threads and release everything. Idempotent. Not to be called beside other calls.
    void close();

private:
    using LaneRegistrations = std::vector<std::uint64_t>;

    struct Registration {
        std::vector<Region> regions;
        // By lane.
        std::vector<LaneRegistrations> handles;
    };

    void require_open() const;
    const std::shared_ptr<Peer> &peer(PeerId id) const;
    LaneRegistrations register_on(Lane &lane, const std::vector<Region> &regions);
    // All lanes or none.
    void connect_lanes(Peer &peer, const std::vector<Bytes> &parts);
    void disconnect_lanes(const Peer &peer);
    void start_copiers();
    void check(const Peer &peer, const Segment &segment) const;
    void check(const Peer &peer, const BlockMap &map) const;
    TransferId begin(std::shared_ptr<Transfer> transfer);

    const TransportLibrary library_;
    const EngineKey key_;
    TransferBook book_;
    const std::vector<EventFd> bells_;
    std::vector<std::unique_ptr<Lane>> lanes_;
    // Beside the lanes.
    const std::size_t helpers_;
    std::optional<Copiers> copiers_;
    // Ids, peers and memory belong to the callers, who take turns.
    mutable std::mutex mutex_;
    std::uint64_t next_id_ = 1;
    RegionTable memory_;
    // By address and length.
    std::map<std::pair<std::uint64_t, std::uint64_t>, Backing> backings_;
    const bool map_peers_;
    std::map<std::uint64_t, Registration> registrations_;
    std::map<PeerId, std::shared_ptr<Peer>> peers_;
};

}  // namespace kvferry
