#include "staging.hpp"

#include <sys/mman.h>

#include <cstring>
#include <string>

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

void *map(std::uint64_t nbytes) {
    void *memory = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        throw Error(KVFERRY_NO_MEMORY, "a staging buffer of " + std::to_string(nbytes) + " bytes does not fit memory");
    }
    // Fewer pages to pin for every write that leaves from here.
    ::madvise(memory, nbytes, MADV_HUGEPAGE);
    return memory;
}

}  // namespace

void Staging::Unmap::operator()(void *memory) const { ::munmap(memory, nbytes); }

Staging::Staging(TransportAgent &agent, std::uint64_t nbytes, std::size_t slots)
    : slot_bytes_(nbytes / slots), memory_(map(nbytes), Unmap{nbytes}) {
    agent.register_memory({reinterpret_cast<std::uint64_t>(memory_.get()), nbytes, KVFERRY_CPU, 0});
    for (std::size_t slot = 0; slot < slots; ++slot) free_.push_back(slot);
}

std::optional<Staging::Gathered> Staging::gather(std::span<const Segment> segments, std::uint64_t below) {
    if (free_.empty()) return std::nullopt;
    Gathered gathered{free_.back(), {}};
    const std::uint64_t start = reinterpret_cast<std::uint64_t>(memory_.get()) + gathered.slot * slot_bytes_;
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

std::uint64_t Staging::copy(std::uint64_t to, std::span<const Segment> run) const {
    std::uint64_t copied = 0;
    for (const Segment &segment : run) {
        std::memcpy(reinterpret_cast<void *>(to + copied), reinterpret_cast<const void *>(segment.src), segment.nbytes);
        copied += segment.nbytes;
    }
    return copied;
}

}  // namespace kvferry
