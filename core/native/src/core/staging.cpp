#include "staging.hpp"

#include <cstring>

#include "scattering.hpp"

namespace kvferry {

namespace {

// How many of the first segments touch one another at the destination and are all short; at least 1.
std::size_t run_length(std::span<const Segment> segments, std::uint64_t below) {
    std::size_t length = 1;
    if (segments.front().nbytes >= below) return length;
    while (length < segments.size()) {
        const Segment &last = segments[length - 1], &next = segments[length];
        if (next.nbytes >= below || last.dst + last.nbytes != next.dst) break;
        ++length;
    }
    return length;
}

}  // namespace

Staging::Staging(TransportAgent &agent, std::uint64_t nbytes, std::size_t slots)
    : slot_bytes_(nbytes / slots), pages_(nbytes) {
    agent.register_memory({pages_.address(), nbytes, KVFERRY_CPU, 0});
    for (std::size_t slot = 0; slot < slots; ++slot) free_.push_back(slot);
}

std::optional<Staging::Gathered> Staging::gather(std::span<const Segment> segments, std::uint64_t below) {
    if (free_.empty()) return std::nullopt;
    Gathered gathered{free_.back(), {}};
    const std::uint64_t start = start_of(gathered.slot);
    std::uint64_t used = 0;
    for (std::size_t at = 0; at < segments.size();) {
        const auto run = segments.subspan(at, run_length(segments.subspan(at), below));
        at += run.size();
        std::uint64_t nbytes = 0;
        for (const Segment &segment : run) nbytes += segment.nbytes;
        if (run.size() == 1 || nbytes > slot_bytes_ - used) {
            gathered.segments.insert(gathered.segments.end(), run.begin(), run.end());
        } else {
            gathered.segments.push_back({start + used, run.front().dst, nbytes});
            used += copy(start + used, run);
        }
    }
    if (used == 0) return std::nullopt;
    free_.pop_back();
    return gathered;
}

std::optional<Staging::Gathered> Staging::pack(std::span<const Segment> segments, std::uint64_t landing) {
    if (free_.empty()) return std::nullopt;
    const std::size_t slot = free_.back();
    free_.pop_back();
    const std::uint64_t nbytes = kvferry::pack(start_of(slot), segments);
    return Gathered{slot, {{start_of(slot), landing, nbytes}}};
}

std::uint64_t Staging::copy(std::uint64_t to, std::span<const Segment> run) const {
    std::uint64_t copied = 0;
    for (const Segment &segment : run) {
        std::memcpy(reinterpret_cast<void *>(to + copied), reinterpret_cast<const void *>(segment.src), segment.nbytes);
        copied += segment.nbytes;
    }
    return copied;
}

}  // namespace kvferry
