// A lane's registered buffer, in slots: small segments that go to adjacent places are gathered there and leave as one.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "transport.hpp"

namespace kvferry {

class Staging {
public:
    // Registers the buffer, until the agent's end, which must come before this one's: what is posted may still be read
    // from here. Raises KVFERRY_NO_MEMORY if there is no such buffer to be had, or what the transport raised.
    Staging(TransportAgent &agent, std::uint64_t nbytes, std::size_t slots);
    Staging(const Staging &) = delete;

    struct Gathered {
        std::size_t slot;
        std::vector<Segment> segments;
    };

    // Copy runs of segments shorter than `below` whose destinations touch into a free slot. Nothing if no slot is free,
    // or there is nothing to gain. The slot is held until `release`.
    std::optional<Gathered> gather(std::span<const Segment> segments, std::uint64_t below);
    void release(std::size_t slot) { free_.push_back(slot); }

private:
    struct Unmap {
        std::uint64_t nbytes;
        void operator()(void *memory) const;
    };

    std::uint64_t copy(std::uint64_t to, std::span<const Segment> run) const;

    const std::uint64_t slot_bytes_;
    std::unique_ptr<void, Unmap> memory_;
    std::vector<std::size_t> free_;
};

}  // namespace kvferry
