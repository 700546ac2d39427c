#include "planner.hpp"

#include <algorithm>
#include <string>

namespace kvferry {

namespace {

struct BlockPair {
    std::int32_t src;
    std::int32_t dst;
};

void require_within(std::int32_t id, std::uint64_t blocks, const char *side) {
    if (id < 0 || static_cast<std::uint64_t>(id) >= blocks) {
        throw Error(KVFERRY_INVALID, std::string(side) + " block " + std::to_string(id) + " is outside the pool's 0 … " +
                                         std::to_string(blocks - 1));
    }
}

std::vector<BlockPair> wanted(const BlockMap &map, std::span<const std::int32_t> src, std::span<const std::int32_t> dst,
                              Order order) {
    if (src.size() != dst.size()) {
        throw Error(KVFERRY_INVALID, std::to_string(src.size()) + " source blocks for " + std::to_string(dst.size()) +
                                         " destination blocks");
    }
    std::vector<BlockPair> pairs;
    pairs.reserve(src.size());
    // By the largest id that is named, and by what the peer says its pool has: neither is believed alone.
    const auto largest = dst.empty() ? 0 : std::max(*std::max_element(dst.begin(), dst.end()), 0);
    std::vector<bool> named(std::min(static_cast<std::uint64_t>(largest) + 1, map.dst_blocks()));
    for (std::size_t index = 0; index < src.size(); ++index) {
        if (src[index] == -1 || dst[index] == -1) continue;
        require_within(src[index], map.src_blocks(), "source");
        require_within(dst[index], map.dst_blocks(), "destination");
        if (named[static_cast<std::size_t>(dst[index])]) {
            throw Error(KVFERRY_INVALID, "destination block " + std::to_string(dst[index]) + " is named twice");
        }
        named[static_cast<std::size_t>(dst[index])] = true;
        pairs.push_back({src[index], dst[index]});
    }
    const auto key = order == Order::kSource ? &BlockPair::src : &BlockPair::dst;
    std::stable_sort(pairs.begin(), pairs.end(), [&](auto left, auto right) { return left.*key < right.*key; });
    return pairs;
}

void require_inside(std::uint64_t offset, std::uint64_t nbytes, std::uint64_t room) {
    if (nbytes > 0 && offset <= room && nbytes <= room - offset) return;
    throw Error(KVFERRY_INVALID, "a run of " + std::to_string(nbytes) + " bytes at " + std::to_string(offset) +
                                     " leaves its block of " + std::to_string(room));
}

// The runs of a block, ascending at the end that counts.
std::vector<Run> ordered(const std::vector<Run> &runs, Order order) {
    std::vector<Run> result = runs;
    const auto key = order == Order::kSource ? &Run::src_offset : &Run::dst_offset;
    std::stable_sort(result.begin(), result.end(), [&](auto left, auto right) { return left.*key < right.*key; });
    return result;
}

void append(std::vector<Segment> &segments, std::size_t first, const Segment &segment) {
    if (segments.size() > first) {
        Segment &last = segments.back();
        if (last.src + last.nbytes == segment.src && last.dst + last.nbytes == segment.dst) {
            last.nbytes += segment.nbytes;
            return;
        }
    }
    segments.push_back(segment);
}

}  // namespace

BlockMap::BlockMap(std::vector<PoolPair> pools) : pools_(std::move(pools)) {
    for (const PoolPair &pool : pools_) {
        for (const Run &run : pool.runs) {
            require_inside(run.src_offset, run.nbytes, pool.src_stride);
            require_inside(run.dst_offset, run.nbytes, pool.dst_stride);
            block_bytes_ += run.nbytes;
        }
        src_blocks_ = std::min(src_blocks_, pool.src_blocks);
        dst_blocks_ = std::min(dst_blocks_, pool.dst_blocks);
    }
    if (block_bytes_ == 0) throw Error(KVFERRY_INVALID, "a block map without pools, or without bytes");
}

std::vector<Segment> plan(const BlockMap &map, std::span<const std::int32_t> src, std::span<const std::int32_t> dst,
                          Order order) {
    const std::vector<BlockPair> pairs = wanted(map, src, dst, order);
    std::vector<Segment> segments;
    segments.reserve(pairs.size());
    for (const PoolPair &pool : map.pools()) {
        const std::size_t first = segments.size();
        const std::vector<Run> runs = ordered(pool.runs, order);
        for (const BlockPair &pair : pairs) {
            const std::uint64_t from = pool.src_base + static_cast<std::uint64_t>(pair.src) * pool.src_stride;
            const std::uint64_t to = pool.dst_base + static_cast<std::uint64_t>(pair.dst) * pool.dst_stride;
            for (const auto &[here, there, nbytes] : runs) append(segments, first, {from + here, to + there, nbytes});
        }
    }
    return segments;
}

std::vector<Segment> split_long(std::vector<Segment> segments, std::uint64_t longest) {
    const auto is_long = [&](const Segment &segment) { return segment.nbytes > longest; };
    if (std::none_of(segments.begin(), segments.end(), is_long)) return segments;
    std::vector<Segment> parts;
    for (Segment segment : segments) {
        for (; is_long(segment); segment.nbytes -= longest) {
            parts.push_back({segment.src, segment.dst, longest});
            segment.src += longest;
            segment.dst += longest;
        }
        parts.push_back(segment);
    }
    return parts;
}

}  // namespace kvferry
