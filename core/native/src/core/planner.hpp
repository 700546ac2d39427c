// From two block tables to the fewest segments, and from segments to what one post may carry.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "transport.hpp"

namespace kvferry {

// A contiguous part of a block: where it starts in the source's block and in the target's, and how many bytes.
struct Run {
    std::uint64_t src_offset;
    std::uint64_t dst_offset;
    std::uint64_t nbytes;
};

// A pool at either end: each pair of blocks gets the same runs.
struct PoolPair {
    std::uint64_t src_base;
    std::uint64_t src_stride;
    std::uint64_t src_blocks;
    std::uint64_t dst_base;
    std::uint64_t dst_stride;
    std::uint64_t dst_blocks;
    std::vector<Run> runs;
};

// All pools of one layer group. Made once for a peer, used for every hand-off.
class BlockMap {
public:
    // Raises KVFERRY_INVALID where a run leaves its block, or there is nothing to copy.
    explicit BlockMap(std::vector<PoolPair> pools);

    const std::vector<PoolPair> &pools() const { return pools_; }
    std::uint64_t block_bytes() const { return block_bytes_; }
    std::uint64_t src_blocks() const { return src_blocks_; }
    std::uint64_t dst_blocks() const { return dst_blocks_; }

private:
    std::vector<PoolPair> pools_;
    std::uint64_t block_bytes_ = 0;
    std::uint64_t src_blocks_ = UINT64_MAX;
    std::uint64_t dst_blocks_ = UINT64_MAX;
};

// Which end's addresses ascend. A gathering lane wants the destination's, so that neighbours there stand together.
enum class Order { kSource, kDestination };

// Plan the runs of `src[i]`'s block for `dst[i]`'s; -1, on either side, = not there, and nothing is moved. Bytes that touch
// at both ends become one segment, which never leaves its pool. Raises KVFERRY_INVALID for an id that is out of range or a
// target named twice.
std::vector<Segment> plan(const BlockMap &map, std::span<const std::int32_t> src, std::span<const std::int32_t> dst,
                          Order order = Order::kSource);

// Cut segments that are longer than `longest`.
std::vector<Segment> split_long(std::vector<Segment> segments, std::uint64_t longest);

}  // namespace kvferry
