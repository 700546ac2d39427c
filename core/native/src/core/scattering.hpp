// Scattering at the target: short segments travel as one run into a buffer of the target's, whose lane puts each where
// it belongs, and says so. What two lanes tell each other about it, as notices of their transport:
//
//   target → writer   grant    these slots of my buffer are yours
//   writer → target   landed   a run is complete in one of them; first comes a list of the places, then their bytes
//   target → writer   placed   all of it is in place, or what is wrong with it; the slot is free
//   target → writer   revoked  whatever has not been placed never will be
//
// A slot belongs to one writer until that writer's process is proven gone: what lands late meets nobody else's bytes.
// A run that was not announced is never placed, and the writer's piece is over only once it was answered.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "descriptor.hpp"
#include "pages.hpp"
#include "regions.hpp"
#include "transport.hpp"

namespace kvferry {

struct Grant {
    // The target's.
    EngineKey key{};
    std::uint64_t slot_bytes = 0;
    // Their addresses.
    std::vector<std::uint64_t> slots;
};

struct Landed {
    // The writer's.
    EngineKey key{};
    std::uint64_t post = 0;
    std::uint64_t slot = 0;
    std::uint64_t nbytes = 0;
};

struct Placed {
    // The target's.
    EngineKey key{};
    std::uint64_t post = 0;
    std::string error;
};

struct Revoked {
    // The target's.
    EngineKey key{};
};

using Notice = std::variant<Grant, Landed, Placed, Revoked>;

Bytes encode(const Notice &notice);
// Raises KVFERRY_INVALID for anything that `encode` did not make.
Notice decode_notice(std::span<const std::uint8_t> body);

// Bytes of a run of so many segments beside their own.
constexpr std::uint64_t list_bytes(std::size_t segments) { return 8 + 16 * segments; }

// Write the list of the segments' destinations, and their bytes, from `to` on. Returns how many bytes that were.
std::uint64_t pack(std::uint64_t to, std::span<const Segment> segments);

// Whether there are so many puts, of less than `below` on average, that a run is faster, or in a long transfer less than
// 16 times that; segments of less than `gathered_below` whose destinations touch are one put.
bool is_worth_scattering(std::span<const Segment> segments, std::uint64_t gathered_below, std::uint64_t below);

// The writer's side: which slots it has of whom.
class Grants {
public:
    void take(const Grant &grant);
    void drop(const EngineKey &key) { slots_.erase(key); }
    bool any(const EngineKey &key) const { return slots_.contains(key); }
    // A free slot that holds so much, until it is released; nothing if there is none now.
    std::optional<std::uint64_t> reserve(const EngineKey &key, std::uint64_t nbytes);
    void release(const EngineKey &key, std::uint64_t slot);
    // Never use it again: what went wrong on its way may still land.
    void retire(const EngineKey &key, std::uint64_t slot);
    bool fits(const EngineKey &key, std::uint64_t nbytes) const;

private:
    struct Slots {
        std::uint64_t each = 0;
        // Address → whether it is taken.
        std::map<std::uint64_t, bool> taken;
    };
    std::map<EngineKey, Slots> slots_;
};

// The target's side: the buffer, who has which slots of it, and putting into place.
class Landing {
public:
    // Registers the buffer until the agent's end, which must come before this one's.
    Landing(TransportAgent &agent, std::uint64_t nbytes);

    // Slots for a writer, if there are any left; it keeps those that it has.
    std::optional<Grant> grant(const EngineKey &writer);
    // `fenced`: the writer never writes here again; otherwise nobody else gets its slots.
    void end(const EngineKey &writer, bool fenced);
    // Put a run into place, within `memory`, unless that was done; returns what is wrong with it, and then nothing was
    // written.
    std::string place(const Landed &landed, const RegionTable &memory);

private:
    struct Slot {
        // The last run that was placed from it, and its outcome: posts of a writer count up.
        std::uint64_t last = 0;
        std::string outcome;
    };

    std::string scatter(const Landed &landed, const RegionTable &memory) const;

    Pages pages_;
    std::uint64_t slot_bytes_;
    std::vector<std::uint64_t> free_;
    std::map<EngineKey, std::map<std::uint64_t, Slot>> granted_;
};

}  // namespace kvferry
