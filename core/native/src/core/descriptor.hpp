// What one engine tells another: which transport, which memory, and the transport's own part for each lane.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "shared_memory.hpp"
#include "transport.hpp"

namespace kvferry {

using EngineKey = std::array<std::uint64_t, 2>;

struct Descriptor {
    std::string transport;
    // Random, unique in time and space.
    EngineKey key{};
    std::vector<Region> regions;
    // By region: where a process of the same host can map it from.
    std::vector<std::optional<Backing>> backings;
    std::vector<Bytes> lanes;
};

Bytes encode(const Descriptor &descriptor);

// Raises KVFERRY_INVALID for anything that `encode` did not make.
Descriptor decode(std::span<const std::uint8_t> body);

}  // namespace kvferry
