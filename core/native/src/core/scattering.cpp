#include "scattering.hpp"

#include <algorithm>
#include <cstring>

#include "byte_stream.hpp"

namespace kvferry {

namespace {

constexpr std::uint32_t kMagic = 0x31'53'56'4b;  // "KVS1"
constexpr std::uint64_t kSlotBytes = 1u << 20;
// Of one writer: it fills one while others travel, and are put into place.
constexpr std::size_t kSlotsEach = 4;
// As fast one by one as by a run, which takes two messages more.
constexpr std::uint64_t kFewPuts = 16;
// In a transfer of so many runs, both sides' copies and the wire go on at the same time: longer puts are worth it too.
constexpr std::uint64_t kManyRuns = 16 * kSlotBytes;
constexpr std::uint64_t kLonger = 16;
// Writers that a lane keeps the grants of: one that comes back has another key.
constexpr std::size_t kGrantsKept = 1024;

EngineKey read_key(ByteReader &in) { return {in.number<std::uint64_t>(), in.number<std::uint64_t>()}; }

template <typename... Actions>
struct Overloaded : Actions... {
    using Actions::operator()...;
};
template <typename... Actions>
Overloaded(Actions...) -> Overloaded<Actions...>;

std::uint64_t word_at(std::uint64_t address) {
    std::uint64_t word;
    std::memcpy(&word, reinterpret_cast<const void *>(address), sizeof word);
    return word;
}

void write_word(std::uint64_t address, std::uint64_t word) {
    std::memcpy(reinterpret_cast<void *>(address), &word, sizeof word);
}

}  // namespace

Bytes encode(const Notice &notice) {
    ByteWriter out;
    out.number(kMagic);
    out.number(static_cast<std::uint8_t>(notice.index()));
    std::visit([&](const auto &each) { out.number(each.key); }, notice);
    std::visit(Overloaded{[&](const Grant &grant) {
                              out.number(grant.slot_bytes);
                              out.number(static_cast<std::uint32_t>(grant.slots.size()));
                              for (const auto slot : grant.slots) out.number(slot);
                          },
                          [&](const Landed &landed) {
                              out.number(landed.post);
                              out.number(landed.slot);
                              out.number(landed.nbytes);
                          },
                          [&](const Placed &placed) {
                              out.number(placed.post);
                              out.text(placed.error);
                          },
                          [](const Revoked &) {}},
               notice);
    return out.take();
}

Notice decode_notice(std::span<const std::uint8_t> body) {
    ByteReader in(body);
    if (in.number<std::uint32_t>() != kMagic) throw Error(KVFERRY_INVALID, "this is no notice of a native engine");
    const auto kind = in.number<std::uint8_t>();
    const EngineKey key = read_key(in);
    switch (kind) {
        case 0: {
            Grant grant{key, in.number<std::uint64_t>(), {}};
            grant.slots.resize(in.count(sizeof(std::uint64_t)));
            for (auto &slot : grant.slots) slot = in.number<std::uint64_t>();
            return grant;
        }
        case 1:
            return Landed{key, in.number<std::uint64_t>(), in.number<std::uint64_t>(), in.number<std::uint64_t>()};
        case 2: {
            Placed placed{key, in.number<std::uint64_t>(), {}};
            placed.error = in.text();
            return placed;
        }
        case 3:
            return Revoked{key};
        default:
            throw Error(KVFERRY_INVALID, "there is no notice of kind " + std::to_string(kind));
    }
}

// --- the writer -------------------------------------------------------------------------------------------------

std::uint64_t pack(std::uint64_t to, std::span<const Segment> segments) {
    write_word(to, segments.size());
    std::uint64_t entry = to + 8, bytes = to + list_bytes(segments.size());
    for (const Segment &segment : segments) {
        write_word(entry, segment.dst);
        write_word(entry + 8, segment.nbytes);
        entry += 16;
        std::memcpy(reinterpret_cast<void *>(bytes), reinterpret_cast<const void *>(segment.src), segment.nbytes);
        bytes += segment.nbytes;
    }
    return bytes - to;
}

bool is_worth_scattering(std::span<const Segment> segments, std::uint64_t gathered_below, std::uint64_t below) {
    std::uint64_t nbytes = 0, puts = 0, end = 0;
    for (const Segment &segment : segments) {
        puts += puts == 0 || segment.dst != end || segment.nbytes >= gathered_below;
        end = segment.dst + segment.nbytes;
        nbytes += segment.nbytes;
    }
    return puts >= kFewPuts && nbytes / puts < (nbytes < kManyRuns ? below : kLonger * below);
}

void Grants::take(const Grant &grant) {
    Slots slots{grant.slot_bytes, {}};
    for (const auto slot : grant.slots) slots.taken[slot] = false;
    if (slots_.size() < kGrantsKept) slots_.emplace(grant.key, std::move(slots));
}

bool Grants::fits(const EngineKey &key, std::uint64_t nbytes) const {
    const auto found = slots_.find(key);
    return found != slots_.end() && nbytes <= found->second.each;
}

std::optional<std::uint64_t> Grants::reserve(const EngineKey &key, std::uint64_t nbytes) {
    if (!fits(key, nbytes)) return std::nullopt;
    for (auto &[slot, taken] : slots_.at(key).taken) {
        if (!std::exchange(taken, true)) return slot;
    }
    return std::nullopt;
}

void Grants::release(const EngineKey &key, std::uint64_t slot) {
    const auto found = slots_.find(key);
    if (found == slots_.end()) return;
    if (const auto entry = found->second.taken.find(slot); entry != found->second.taken.end()) entry->second = false;
}

void Grants::retire(const EngineKey &key, std::uint64_t slot) {
    const auto found = slots_.find(key);
    if (found == slots_.end()) return;
    found->second.taken.erase(slot);
    if (found->second.taken.empty()) slots_.erase(found);
}

// --- the target -------------------------------------------------------------------------------------------------

Landing::Landing(TransportAgent &agent, std::uint64_t nbytes)
    : pages_(nbytes), slot_bytes_(std::min(nbytes, kSlotBytes)) {
    agent.register_memory({pages_.address(), nbytes, KVFERRY_CPU, 0});
    for (std::uint64_t slot = 0; slot < nbytes / slot_bytes_; ++slot) {
        free_.push_back(pages_.address() + slot * slot_bytes_);
    }
}

std::optional<Grant> Landing::grant(const EngineKey &writer) {
    auto &slots = granted_[writer];
    while (slots.size() < kSlotsEach && !free_.empty()) {
        slots.emplace(free_.back(), Slot{});
        free_.pop_back();
    }
    if (slots.empty()) {
        granted_.erase(writer);
        return std::nullopt;
    }
    Grant grant{{}, slot_bytes_, {}};
    for (const auto &[address, slot] : slots) grant.slots.push_back(address);
    return grant;
}

void Landing::end(const EngineKey &writer, bool fenced) {
    const auto found = granted_.find(writer);
    if (found == granted_.end()) return;
    for (const auto &[address, slot] : found->second) {
        if (fenced) free_.push_back(address);
    }
    granted_.erase(found);
}

std::string Landing::place(const Landed &landed, const RegionTable &memory) {
    const auto writer = granted_.find(landed.key);
    if (writer == granted_.end()) return "the target has granted no slot to this writer";
    const auto slot = writer->second.find(landed.slot);
    if (slot == writer->second.end()) return "that slot is another writer's";
    if (landed.post > slot->second.last) slot->second = {landed.post, scatter(landed, memory)};
    return slot->second.outcome;
}

std::string Landing::scatter(const Landed &landed, const RegionTable &memory) const {
    const std::uint64_t count = landed.nbytes >= 8 ? word_at(landed.slot) : UINT64_MAX;
    if (landed.nbytes > slot_bytes_ || count > landed.nbytes / 16 || list_bytes(count) > landed.nbytes) {
        return "the run is longer than its slot, or damaged";
    }
    std::vector<Segment> segments(count);
    std::uint64_t from = landed.slot + list_bytes(count);
    const std::uint64_t end = landed.slot + landed.nbytes;
    for (std::uint64_t index = 0; index < count; ++index) {
        const std::uint64_t entry = landed.slot + 8 + 16 * index;
        segments[index] = {from, word_at(entry), word_at(entry + 8)};
        if (segments[index].nbytes > end - from) return "the run is shorter than its list says";
        if (!memory.covers(segments[index].dst, segments[index].nbytes)) {
            return "the target has not registered that memory";
        }
        from += segments[index].nbytes;
    }
    for (const Segment &segment : segments) {
        std::memcpy(reinterpret_cast<void *>(segment.dst), reinterpret_cast<const void *>(segment.src), segment.nbytes);
    }
    return {};
}

}  // namespace kvferry
