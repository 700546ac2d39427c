// Transfers on their way: who may post which piece next, and what has ended. A monitor shared by the lanes and the
// caller; no call of a transport is made under its lock.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "descriptor.hpp"
#include "file_descriptor.hpp"
#include "planner.hpp"
#include "regions.hpp"
#include "shared_memory.hpp"

namespace kvferry {

using TransferId = std::uint64_t;
using PeerId = std::uint64_t;

struct Completion {
    TransferId id;
    bool ok;
    std::string error;
    // Bytes that are complete at the target: all of them, or what went before the error.
    std::uint64_t nbytes;
};

struct Peer {
    PeerId id = 0;
    EngineKey key{};
    RegionTable regions;
    // Those of a process of this host that we could map: writing there is copying.
    MappedRegions mapped;
    // The transport's name for it, by lane.
    std::vector<std::uint64_t> handles;
    // Its pidfd, if it is a process of this host.
    FileDescriptor process;
    // Pieces in flight, by lane; each entry belongs to its lane's thread.
    std::vector<unsigned> in_flight;
    // Under the book's lock: disconnected, by us or because its process ended.
    bool left = false;
};

// Block lists that are planned by a lane, not by the caller.
struct BlockOrder {
    std::shared_ptr<const BlockMap> map;
    std::vector<std::int32_t> src;
    std::vector<std::int32_t> dst;
};

// Consecutive segments of a transfer.
struct Range {
    std::size_t first = 0;
    std::size_t last = 0;
    std::uint64_t nbytes = 0;
};

struct Transfer {
    TransferId id = 0;
    std::shared_ptr<Peer> peer;
    std::optional<BlockOrder> order;
    std::vector<Segment> segments;
    std::optional<Bytes> notice;

    // Under the book's lock.
    std::size_t next = 0;
    // Cut, but given back by a lane whose transport had no room.
    std::vector<Range> returned;
    unsigned in_flight = 0;
    std::uint64_t done = 0;
    bool planned = false;
    std::string error;

    bool stopped() const { return !error.empty(); }
    bool all_taken() const { return next == segments.size() && returned.empty(); }
    bool over() const { return in_flight == 0 && (stopped() || (planned && all_taken())); }
};

// Segments of one transfer that are posted together. They lie in the transfer's own list, which is complete by then.
struct Piece {
    std::shared_ptr<Transfer> transfer;
    Range range;

    std::span<const Segment> segments() const {
        return {transfer->segments.data() + range.first, range.last - range.first};
    }
};

struct PieceLimits {
    std::uint64_t nbytes = 8u << 20;
    std::size_t segments = 1024;
    // Pieces of one peer that a lane has posted at once: enough to keep a wire busy, few enough to stop soon.
    unsigned in_flight = 4;
};

class TransferBook {
public:
    explicit TransferBook(PieceLimits limits) : limits_(limits) {}

    // --- the caller ---
    void submit(std::shared_ptr<Transfer> transfer);
    // Post nothing more of it; it ends, with `reason`, once nothing is in flight. False: it is over already.
    bool stop(TransferId id, const std::string &reason);
    // The same for all of a peer; and let nothing new begin.
    void leave(const std::shared_ptr<Peer> &peer, const std::string &reason);
    // Bytes complete at the target so far, or nothing if it is over.
    std::optional<std::uint64_t> bytes_done(TransferId id) const;
    std::vector<Completion> collect();
    // The oldest go once nobody collects them.
    void put_notice(Bytes notice);
    std::vector<Bytes> collect_notices();
    // Readable once there is something new to collect; after `collect` no longer, whatever notices are left.
    int wakeup_fd() const { return ended_.get(); }

    // --- the lanes ---
    std::shared_ptr<Transfer> take_unplanned();
    // Returns the transfer if there is nothing to move: then the lane `ends` it.
    std::shared_ptr<Transfer> planned(const std::shared_ptr<Transfer> &transfer, std::vector<Segment> segments);
    // The next piece that this lane may post; transfers take turns.
    std::optional<Piece> take(std::size_t lane);
    void put_back(const Piece &piece, std::size_t lane);
    // Returns the transfer if that was its last piece: then the lane `ends` it.
    std::shared_ptr<Transfer> finish(const Piece &piece, std::size_t lane, const std::string &error);
    void fail(const std::shared_ptr<Transfer> &transfer, const std::string &error);
    void end(const std::shared_ptr<Transfer> &transfer);
    bool is_stopped(const Transfer &transfer) const;
    bool has_work() const;

private:
    void stop_locked(const std::shared_ptr<Transfer> &transfer, const std::string &reason);
    void end_if_over_locked(const std::shared_ptr<Transfer> &transfer);
    void end_locked(const std::shared_ptr<Transfer> &transfer);
    Range cut_locked(Transfer &transfer) const;

    const PieceLimits limits_;
    const EventFd ended_;
    mutable std::mutex mutex_;
    std::unordered_map<TransferId, std::shared_ptr<Transfer>> live_;
    std::deque<std::shared_ptr<Transfer>> unplanned_;
    std::deque<std::shared_ptr<Transfer>> ready_;
    std::vector<Completion> completions_;
    std::deque<Bytes> notices_;
};

}  // namespace kvferry
