// A lane's registered buffer, in slots: small segments that go to adjacent places are gathered there and leave as one.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "pages.hpp"
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
    // All of them, behind a list of their destinations, for a slot of the target's. Nothing if no slot is free.
    std::optional<Gathered> pack(std::span<const Segment> segments, std::uint64_t landing);
    bool fits(std::uint64_t nbytes) const { return nbytes <= slot_bytes_; }
    void release(std::size_t slot) { free_.push_back(slot); }

private:
    std::uint64_t start_of(std::size_t slot) const { return pages_.address() + slot * slot_bytes_; }
    std::uint64_t copy(std::uint64_t to, std::span<const Segment> run) const;

    const std::uint64_t slot_bytes_;
    const Pages pages_;
    std::vector<std::size_t> free_;
};

}  // namespace kvferry
