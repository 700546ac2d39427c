// Transfers on their way: who may post or copy which piece next, and what has ended. A monitor shared by the lanes, the
// copiers and the caller; no call of a transport is made under its lock, and nothing is copied.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
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

inline const char *const kProcessEnded = "the peer's process ended";

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
    // Whether all of its memory is the host's.
    bool on_host = true;
    // The transport's name for it, by lane.
    std::vector<std::uint64_t> handles;
    // Its pidfd, if it is a process of this host.
    FileDescriptor process;
    // Pieces that the transport has, by lane; under the book's lock.
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

// A transfer's segments, cut: first those to memory that is mapped here, whose destination is our address of it.
struct Plan {
    std::vector<Segment> segments;
    std::size_t copies = 0;
    std::uint64_t copied_bytes = 0;
    // The others are too short to be put one by one: they are scattered by the target.
    bool scatters = false;
};

struct Transfer {
    TransferId id = 0;
    std::shared_ptr<Peer> peer;
    std::optional<BlockOrder> order;
    // What was submitted, unless it was blocks; only `planned` changes it, under the book's lock.
    std::vector<Segment> segments;

    // Under the book's lock.
    std::size_t copies = 0;
    std::uint64_t copied_bytes = 0;
    bool scatters = false;
    std::size_t next_copy = 0;
    std::size_t next_post = 0;
    // Cut, but given back by a lane whose transport had no room.
    std::vector<Range> returned;
    unsigned in_flight = 0;
    std::uint64_t done = 0;
    bool planned = false;
    std::string error;

    bool stopped() const { return !error.empty(); }
    bool may_copy() const { return next_copy < copies; }
    bool may_post() const { return next_post < segments.size() || !returned.empty(); }
    bool all_taken() const { return !may_copy() && !may_post(); }
    bool over() const { return in_flight == 0 && (stopped() || (planned && all_taken())); }
};

// Segments of one transfer that are posted, or copied, together. They lie in the transfer's own list, which is complete
// by then.
struct Piece {
    std::shared_ptr<Transfer> transfer;
    Range range;
    bool is_copy = false;

    std::span<const Segment> segments() const {
        return {transfer->segments.data() + range.first, range.last - range.first};
    }
};

struct PieceLimits {
    std::uint64_t nbytes = 8u << 20;
    std::size_t segments = 1024;
    // Pieces of one peer that a lane has posted at once: enough to keep a wire busy, few enough to stop soon.
    unsigned in_flight = 4;

    // Of a piece that is copied: several threads share a transfer of a few MiB.
    std::uint64_t copied_bytes() const { return std::min<std::uint64_t>(nbytes, 2u << 20); }
    // Of one that the target scatters: with its list it fits a slot of 1 MiB.
    std::size_t scattered_segments() const { return 4 * segments; }
    std::uint64_t scattered_bytes() const {
        return std::min<std::uint64_t>(nbytes, (1u << 20) - std::min<std::uint64_t>(1u << 19, 8 + 16 * scattered_segments()));
    }
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
    // The same for all that `reads` says; false: some of it is still in flight after so long.
    bool stop_all(const std::function<bool(const Transfer &)> &reads, const std::string &reason,
                  std::chrono::milliseconds patience);
    // Bytes complete at the target so far, or nothing if it is over.
    std::optional<std::uint64_t> bytes_done(TransferId id) const;
    std::vector<Completion> collect();
    // Readable once there is something to collect.
    int wakeup_fd() const { return ended_.get(); }

    // --- the lanes ---
    std::shared_ptr<Transfer> take_unplanned();
    void planned(const std::shared_ptr<Transfer> &transfer, Plan plan);
    // The next piece that this lane may post, or copy; transfers take turns.
    std::optional<Piece> take(std::size_t lane);
    void put_back(const Piece &piece, std::size_t lane);
    // A piece is over, well or with an error.
    void finish(const Piece &piece, std::size_t lane, const std::string &error);
    void fail(const std::shared_ptr<Transfer> &transfer, const std::string &error);
    bool is_stopped(const Transfer &transfer) const;
    bool has_work() const;

    // --- the copiers ---
    // Waits for a piece to copy; nothing once `shut`.
    std::optional<Piece> take_copy();
    void finish_copy(const Piece &piece, const std::string &error);
    void shut();

private:
    std::shared_ptr<Transfer> next_locked(const std::function<bool(const Transfer &)> &wanted);
    Piece cut_locked(std::shared_ptr<Transfer> transfer, bool is_copy);
    void settle_locked(const Piece &piece, const std::string &error);
    void stop_locked(const std::shared_ptr<Transfer> &transfer, const std::string &reason);
    void end_if_over_locked(const std::shared_ptr<Transfer> &transfer);

    const PieceLimits limits_;
    const EventFd ended_;
    mutable std::mutex mutex_;
    std::unordered_map<TransferId, std::shared_ptr<Transfer>> live_;
    std::deque<std::shared_ptr<Transfer>> unplanned_;
    std::deque<std::shared_ptr<Transfer>> ready_;
    std::vector<Completion> completions_;
    // There is something to copy, or no more ever.
    std::condition_variable copies_;
    bool shut_ = false;
    // A transfer is over.
    std::condition_variable over_;
};

}  // namespace kvferry
