// The engine over the in-process transport; built plain and under ThreadSanitizer.
#include "core/engine.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include "check.hpp"

using namespace kvferry;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t kBytes = 4 << 20;

TransportLibrary inprocess() { return TransportLibrary(kvferry_transport_v1()); }

struct Side {
    // Goes after the engine, whose threads write to it.
    std::vector<std::uint8_t> memory;
    Engine engine;

    explicit Side(const EngineOptions &options = {}) : memory(kBytes), engine(inprocess(), options) {
        engine.register_memory({{address(), kBytes, KVFERRY_CPU, 0}});
    }

    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(memory.data()); }

    void fill() {
        for (std::size_t index = 0; index < memory.size(); ++index) memory[index] = static_cast<std::uint8_t>(index * 7);
    }

    Completion wait(TransferId id) {
        std::optional<Completion> found;
        CHECK(eventually([&] {
            for (auto &completion : engine.collect()) {
                if (completion.id == id) found = completion;
            }
            return found.has_value();
        }));
        return *found;
    }
};

EngineOptions small_pieces(Options transport = {}, std::size_t lanes = 1) {
    EngineOptions options;
    options.lanes = lanes;
    options.pieces = {64 << 10, 16, 4};
    options.transport = std::move(transport);
    return options;
}

std::vector<Segment> whole(const Side &from, const Side &to, std::size_t pieces = 1) {
    std::vector<Segment> segments;
    for (std::size_t index = 0; index < pieces; ++index) {
        const std::size_t offset = index * (kBytes / pieces);
        segments.push_back({from.address() + offset, to.address() + offset, kBytes / pieces});
    }
    return segments;
}

// One of 32 equal parts, in 8 pieces: two transfers of different parts never meet.
std::vector<Segment> part(const Side &from, const Side &to, std::size_t number) {
    std::vector<Segment> segments;
    constexpr std::size_t kPiece = kBytes / 32 / 8;
    for (std::size_t index = number * 8; index < number * 8 + 8; ++index) {
        segments.push_back({from.address() + index * kPiece, to.address() + index * kPiece, kPiece});
    }
    return segments;
}

PeerId meet(Side &from, Side &to) { return from.engine.connect(to.engine.descriptor(), FileDescriptor()); }

void bytes_arrive(std::size_t lanes, Options transport) {
    Side from(small_pieces(std::move(transport), lanes)), to(small_pieces());
    from.fill();
    const PeerId peer = meet(from, to);
    CHECK(meet(from, to) == peer);
    for (std::size_t pieces : {1, 7, 512}) {
        std::fill(to.memory.begin(), to.memory.end(), std::uint8_t{0});
        const Completion end = from.wait(from.engine.submit(peer, whole(from, to, pieces)));
        CHECK(end.ok);
        CHECK(end.nbytes == kBytes / pieces * pieces);
        CHECK(std::equal(to.memory.begin(), to.memory.begin() + static_cast<long>(end.nbytes), from.memory.begin()));
    }
}

void block_lists_arrive(std::uint64_t staging_bytes) {
    EngineOptions options = small_pieces();
    options.staging_bytes = staging_bytes;
    Side from(options), to(small_pieces());
    from.fill();
    constexpr std::size_t kBlock = 4096, kBlocks = kBytes / kBlock;
    auto map = std::make_shared<const BlockMap>(std::vector<PoolPair>{
        {from.address(), kBlock, kBlocks, to.address(), kBlock, kBlocks, {{0, 0, 1024}, {2048, 2048, 1024}}}});
    std::vector<std::int32_t> src(kBlocks / 2), dst(kBlocks / 2);
    std::iota(src.begin(), src.end(), 0);
    for (std::size_t index = 0; index < dst.size(); ++index) dst[index] = static_cast<std::int32_t>(kBlocks - 1 - index);
    const auto end = from.wait(from.engine.submit_blocks(meet(from, to), {map, src, dst}));
    CHECK(end.ok);
    for (std::size_t index = 0; index < src.size(); ++index) {
        const auto *source = &from.memory[static_cast<std::size_t>(src[index]) * kBlock];
        const auto *target = &to.memory[static_cast<std::size_t>(dst[index]) * kBlock];
        CHECK(std::equal(source, source + 1024, target));
        CHECK(std::equal(source + 2048, source + 3072, target + 2048));
        CHECK(target[1024] == 0);
    }
    const auto bad = from.wait(from.engine.submit_blocks(meet(from, to), {map, {0, 1}, {5, 5}}));
    CHECK(!bad.ok && bad.nbytes == 0 && bad.error == "destination block 5 is named twice");
}

// Blocks of 512 bytes from all over the place to neighbours.
void small_blocks_are_gathered(std::uint64_t staging_bytes) {
    EngineOptions options = small_pieces({{"again_every", "3"}, {"delay_us", "50"}});
    options.staging_bytes = staging_bytes;
    Side from(options), to(small_pieces());
    from.fill();
    constexpr std::size_t kBlock = 512, kBlocks = kBytes / kBlock;
    auto map = std::make_shared<const BlockMap>(std::vector<PoolPair>{
        {from.address(), kBlock, kBlocks, to.address(), kBlock, kBlocks, {{0, 0, kBlock}}}});
    std::vector<std::int32_t> src(kBlocks), dst(kBlocks);
    for (std::size_t index = 0; index < kBlocks; ++index) {
        src[index] = static_cast<std::int32_t>(index * 4099 % kBlocks);
        dst[index] = static_cast<std::int32_t>(index);
    }
    CHECK(from.wait(from.engine.submit_blocks(meet(from, to), {map, src, dst})).ok);
    for (std::size_t index = 0; index < kBlocks; ++index) {
        const auto *source = &from.memory[static_cast<std::size_t>(src[index]) * kBlock];
        CHECK(std::equal(source, source + kBlock, &to.memory[index * kBlock]));
    }
}

EngineOptions scattering(Options transport = {}) {
    EngineOptions options;
    options.staging_bytes = 8 << 20;
    options.transport = std::move(transport);
    return options;
}

// Blocks of 512 bytes from all over the place to all over the place, odd ones with a gap.
struct Scattered {
    static constexpr std::size_t kBlock = 512, kBlocks = kBytes / kBlock;
    Side &from, &to;
    std::vector<std::int32_t> src = std::vector<std::int32_t>(kBlocks), dst = src;

    Scattered(Side &writer, Side &target) : from(writer), to(target) {
        for (std::size_t index = 0; index < kBlocks; ++index) {
            src[index] = static_cast<std::int32_t>(index * 4099 % kBlocks);
            dst[index] = static_cast<std::int32_t>(index * 2731 % kBlocks);
        }
    }

    BlockOrder order(std::size_t first, std::size_t count) const {
        const std::vector<Run> runs{{0, 0, 200}, {300, 300, 212}};
        const PoolPair pool{from.address(), kBlock, kBlocks, to.address(), kBlock, kBlocks, runs};
        auto map = std::make_shared<const BlockMap>(std::vector<PoolPair>{pool});
        const auto begin = static_cast<std::ptrdiff_t>(first), end = static_cast<std::ptrdiff_t>(first + count);
        return {map, {src.begin() + begin, src.begin() + end}, {dst.begin() + begin, dst.begin() + end}};
    }

    bool arrived(std::size_t first, std::size_t count) const {
        for (std::size_t index = first; index < first + count; ++index) {
            const auto *source = &from.memory[static_cast<std::size_t>(src[index]) * kBlock];
            const auto *target = &to.memory[static_cast<std::size_t>(dst[index]) * kBlock];
            if (!std::equal(source, source + 200, target) || !std::equal(source + 300, source + 512, target + 300) ||
                std::any_of(target + 200, target + 300, [](auto byte) { return byte != 0; })) {
                return false;
            }
        }
        return true;
    }
};

// The writer's transport refuses posts of several segments: what arrives was scattered by the target.
void short_segments_are_scattered_by_the_target(Options transport) {
    transport["refuse_lists"] = "1";
    Side from(scattering(std::move(transport))), to(scattering());
    from.fill();
    const PeerId peer = meet(from, to);
    meet(to, from);
    const Scattered blocks(from, to);
    // Until the target's grant is there.
    CHECK(eventually([&] { return from.wait(from.engine.submit_blocks(peer, blocks.order(0, 64))).ok; }));
    for (int round = 0; round < 3; ++round) {
        std::fill(to.memory.begin(), to.memory.end(), std::uint8_t{0});
        const auto end = from.wait(from.engine.submit_blocks(peer, blocks.order(0, Scattered::kBlocks)));
        CHECK(end.ok && end.nbytes == Scattered::kBlocks * 412);
        CHECK(blocks.arrived(0, Scattered::kBlocks));
    }
}

// Blocks that the target has freed by then are somebody else's.
void nothing_is_placed_once_a_scattered_transfer_is_over() {
    Side from(scattering({{"delay_us", "500"}})), to(scattering());
    from.fill();
    const PeerId peer = meet(from, to);
    meet(to, from);
    const Scattered blocks(from, to);
    for (int round = 0; round < 30; ++round) {
        const auto id = from.engine.submit_blocks(peer, blocks.order(0, Scattered::kBlocks));
        std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
        from.engine.cancel(id, "enough");
        from.wait(id);
        std::fill(to.memory.begin(), to.memory.end(), std::uint8_t{0});
        std::this_thread::sleep_for(2ms);
        CHECK(std::all_of(to.memory.begin(), to.memory.end(), [](auto byte) { return byte == 0; }));
    }
}

void what_the_target_no_longer_has_is_refused_and_told() {
    Side from(scattering()), to(scattering());
    std::vector<std::uint8_t> other(1 << 20);
    const auto there = reinterpret_cast<std::uint64_t>(other.data());
    const auto registration = to.engine.register_memory({{there, other.size(), KVFERRY_CPU, 0}});
    const PeerId peer = meet(from, to);
    meet(to, from);
    from.fill();
    std::vector<Segment> segments;
    for (std::uint64_t index = 0; index < 64; ++index) {
        segments.push_back({from.address() + index * 4096, there + index * 8192, 4096});
    }
    CHECK(from.wait(from.engine.submit(peer, segments)).ok && other[8192] == from.memory[4096]);
    to.engine.deregister_memory(registration);
    std::fill(other.begin(), other.end(), std::uint8_t{0});
    const auto end = from.wait(from.engine.submit(peer, segments));
    CHECK(!end.ok && end.error == "the target has not registered that memory" && end.nbytes == 0);
    CHECK(std::all_of(other.begin(), other.end(), [](auto byte) { return byte == 0; }));
}

void many_writers_have_slots_of_their_own_and_a_target_that_leaves_ends_them() {
    auto to = std::make_unique<Side>(scattering());
    std::vector<std::unique_ptr<Side>> writers;
    std::vector<PeerId> peers, known;
    std::vector<TransferId> ids;
    constexpr std::size_t kEach = Scattered::kBlocks / 4;
    for (std::size_t index = 0; index < 4; ++index) {
        writers.push_back(std::make_unique<Side>(scattering({{"again_every", "3"}})));
        writers.back()->fill();
        peers.push_back(meet(*writers.back(), *to));
        known.push_back(meet(*to, *writers.back()));
    }
    for (int round = 0; round < 5; ++round) {
        std::fill(to->memory.begin(), to->memory.end(), std::uint8_t{0});
        ids.clear();
        for (std::size_t index = 0; index < 4; ++index) {
            const Scattered blocks(*writers[index], *to);
            ids.push_back(writers[index]->engine.submit_blocks(peers[index], blocks.order(index * kEach, kEach)));
        }
        for (std::size_t index = 0; index < 4; ++index) {
            CHECK(writers[index]->wait(ids[index]).ok);
            CHECK(Scattered(*writers[index], *to).arrived(index * kEach, kEach));
        }
    }
    for (std::size_t index = 0; index < 4; ++index) {
        const Scattered blocks(*writers[index], *to);
        ids[index] = writers[index]->engine.submit_blocks(peers[index], blocks.order(0, Scattered::kBlocks));
    }
    to->engine.disconnect(known[0]);
    to->engine.disconnect(known[1], true);
    to.reset();
    for (std::size_t index = 0; index < 4; ++index) writers[index]->wait(ids[index]);
}

void damaged_runs_and_notices_are_refused() {
    TransportAgent agent(inprocess(), {});
    Landing landing(agent, 4 << 20);
    RegionTable memory;
    std::vector<std::uint8_t> pool(4096);
    const auto address = reinterpret_cast<std::uint64_t>(pool.data());
    memory.add({address, pool.size(), KVFERRY_CPU, 0});
    const EngineKey writer{1, 2}, stranger{3, 4};
    const Grant grant = *landing.grant(writer);
    CHECK(grant.slots.size() == 4 && !landing.grant(stranger));
    const std::uint64_t slot = grant.slots[0];
    const std::vector<std::uint8_t> source(64, 7);
    const auto from = reinterpret_cast<std::uint64_t>(source.data());
    std::uint64_t post = 0;
    const auto place = [&](std::vector<Segment> segments, std::int64_t more = 0, EngineKey key = {1, 2}) {
        const std::uint64_t nbytes = pack(slot, segments);
        return landing.place({key, ++post, slot, nbytes + static_cast<std::uint64_t>(more)}, memory);
    };
    CHECK(place({{from, address, 32}, {from, address + 100, 32}}).empty() && pool[131] == 7 && pool[132] == 0);
    std::fill(pool.begin(), pool.end(), std::uint8_t{0});
    // Told again: it was done, and the pool may be another's by now.
    CHECK(landing.place({writer, post, slot, 96}, memory).empty() && pool[0] == 0);
    CHECK(place({{from, address, 32}, {from, address + 4090, 32}}) == "the target has not registered that memory");
    CHECK(place({{from, address, 32}}, -1) == "the run is shorter than its list says");
    CHECK(place({{from, address, 32}}, std::int64_t{1} << 40) == "the run is longer than its slot, or damaged");
    const std::uint64_t many = UINT64_MAX / 16;
    std::memcpy(reinterpret_cast<void *>(slot), &many, sizeof many);
    CHECK(landing.place({writer, ++post, slot, 1000}, memory) == "the run is longer than its slot, or damaged");
    CHECK(landing.place({writer, ++post, slot, 3}, memory) == "the run is longer than its slot, or damaged");
    CHECK(landing.place({writer, ++post, slot + 8, 100}, memory) == "that slot is another writer's");
    CHECK(place({{from, address, 32}}, 0, stranger) == "the target has granted no slot to this writer");
    CHECK(std::all_of(pool.begin(), pool.end(), [](auto byte) { return byte == 0; }));
    landing.end(writer, false);
    CHECK(!landing.grant(stranger));
    const Bytes notice = encode(Notice{Placed{writer, 5, "no"}});
    CHECK(std::get<Placed>(decode_notice(notice)).error == "no");
    for (std::size_t length = 0; length < notice.size(); ++length) {
        CHECK(!message_of<Error>([&] { decode_notice(std::span(notice).first(length)); }).empty());
    }
}

// A file in memory that cannot shrink, as our pools are.
struct SharedMemory {
    FileDescriptor file{static_cast<int>(::syscall(SYS_memfd_create, "test", MFD_ALLOW_SEALING))};
    std::uint8_t *bytes = nullptr;

    SharedMemory() {
        CHECK(::ftruncate(file.get(), kBytes) == 0 && ::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
        bytes = static_cast<std::uint8_t *>(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0));
        CHECK(bytes != MAP_FAILED);
    }
    ~SharedMemory() { ::munmap(bytes, kBytes); }
};

// The transport would refuse every post: what arrives was copied.
void shared_memory_is_copied_to_by_all_lanes() {
    const SharedMemory shared;
    Side from(small_pieces({{"fail_every", "1"}}, 2));
    Engine to(inprocess(), {});
    const auto address = reinterpret_cast<std::uint64_t>(shared.bytes);
    to.register_memory({{address, kBytes, KVFERRY_CPU, 0}});
    from.fill();
    const FileDescriptor self(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
    const PeerId peer = from.engine.connect(to.descriptor(), FileDescriptor(::dup(self.get())));
    CHECK(from.engine.maps(peer));
    const auto end = from.wait(from.engine.submit(peer, {{from.address() + 3, address + 5, kBytes - 9}}));
    CHECK(end.ok && end.nbytes == kBytes - 9);
    CHECK(std::equal(shared.bytes + 5, shared.bytes + kBytes - 4, from.memory.begin() + 3));
    CHECK(shared.bytes[4] == 0 && shared.bytes[kBytes - 4] == 0);
}

// Two engines of this process, of which the second has shared memory, as a pool lies in.
struct Mapped {
    const SharedMemory shared;
    Side from;
    Engine to{inprocess(), {}};
    std::uint64_t there = reinterpret_cast<std::uint64_t>(shared.bytes);
    PeerId peer = 0;

    explicit Mapped(const EngineOptions &options) : from(options) {
        to.register_memory({{there, kBytes, KVFERRY_CPU, 0}});
        peer = from.engine.connect(to.descriptor(), self());
    }

    static FileDescriptor self() { return FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0))); }
};

EngineOptions copying(std::size_t threads) {
    EngineOptions options = small_pieces({{"fail_every", "1"}});
    options.copy_threads = threads;
    return options;
}

void copiers_share_a_transfer() {
    Mapped mapped(copying(3));
    for (std::uint8_t round = 0; round < 20; ++round) {
        for (std::size_t index = 0; index < kBytes; ++index) {
            mapped.from.memory[index] = static_cast<std::uint8_t>(index * 7 + round);
        }
        std::vector<Segment> segments;
        for (std::size_t index = 0; index < 1000; ++index) {
            segments.push_back({mapped.from.address() + index * 4096, mapped.there + (index * 7 % 1000) * 4096, 4096});
        }
        const auto end = mapped.from.wait(mapped.from.engine.submit(mapped.peer, segments));
        CHECK(end.ok && end.nbytes == 4096 * 1000);
        for (std::size_t index = 0; index < 1000; ++index) {
            const auto *source = &mapped.from.memory[index * 4096];
            CHECK(std::equal(source, source + 4096, mapped.shared.bytes + (index * 7 % 1000) * 4096));
        }
    }
}

void copiers_are_cancelled_and_closed() {
    Mapped mapped(copying(2));
    const std::vector<Segment> all{{mapped.from.address(), mapped.there, kBytes}};
    std::vector<TransferId> ids;
    for (int each = 0; each < 50; ++each) {
        ids.push_back(mapped.from.engine.submit(mapped.peer, all));
        if (each % 2 == 0) mapped.from.engine.cancel(ids.back(), "enough");
    }
    std::size_t ended = 0;
    CHECK(eventually([&] { return (ended += mapped.from.engine.collect().size()) == ids.size(); }));
    // What is over is over: nothing is written behind its completion.
    std::memset(mapped.shared.bytes, 0, kBytes);
    for (int each = 0; each < 50; ++each) mapped.from.engine.submit(mapped.peer, all);
    mapped.from.engine.disconnect(mapped.peer);
    for (int each = 0; each < 10; ++each) {
        mapped.peer = mapped.from.engine.connect(mapped.to.descriptor(), Mapped::self());
        mapped.from.engine.submit(mapped.peer, all);
        mapped.from.engine.disconnect(mapped.peer);
    }
    mapped.peer = mapped.from.engine.connect(mapped.to.descriptor(), Mapped::self());
    for (int each = 0; each < 50; ++each) mapped.from.engine.submit(mapped.peer, all);
    mapped.from.engine.close();
}

void what_is_not_registered_is_refused() {
    Side from, to;
    const PeerId peer = meet(from, to);
    auto segments = whole(from, to);
    segments[0].dst += 1;
    CHECK(message_of<Error>([&] { from.engine.submit(peer, segments); }).starts_with("the peer has not registered"));
    CHECK(message_of<Error>([&] { from.engine.connect(Bytes(100, 7), FileDescriptor()); }) ==
          "this is no descriptor of a native engine");
    auto cut = to.engine.descriptor();
    cut.pop_back();
    CHECK(message_of<Error>([&] { from.engine.connect(cut, FileDescriptor()); }) ==
          "the descriptor is cut short or damaged");
    CHECK(from.engine.collect().empty());
}

void failures_end_a_transfer_once() {
    Side from(small_pieces({{"fail_every", "5"}})), to;
    const auto end = from.wait(from.engine.submit(meet(from, to), whole(from, to, 64)));
    CHECK(!end.ok && end.error == "asked to fail" && end.nbytes < kBytes);
    std::this_thread::sleep_for(20ms);
    CHECK(from.engine.collect().empty());
}

void cancellation_ends_once_nothing_is_in_flight() {
    Side from(small_pieces({{"delay_us", "20000"}})), to;
    const PeerId peer = meet(from, to);
    const auto id = from.engine.submit(peer, whole(from, to, 64));
    CHECK(eventually([&] { return from.engine.bytes_done(id).value_or(0) > 0; }));
    CHECK(from.engine.cancel(id, "changed our mind"));
    const auto end = from.wait(id);
    CHECK(!end.ok && end.error == "changed our mind" && end.nbytes < kBytes);
    CHECK(!from.engine.cancel(id, "again"));
    const auto second = from.engine.submit(peer, whole(from, to, 64));
    from.engine.disconnect(peer);
    CHECK(from.wait(second).error == "disconnected");
}

void deregistering_ends_what_would_be_read_from_there() {
    Side from(small_pieces({{"delay_us", "20000"}})), to;
    from.fill();
    std::vector<std::uint8_t> other(64 << 10, 1);
    const Region region{reinterpret_cast<std::uint64_t>(other.data()), other.size(), KVFERRY_CPU, 0};
    const auto registration = from.engine.register_memory({region});
    const PeerId peer = meet(from, to);
    const auto stays = from.engine.submit(peer, part(from, to, 3));
    std::vector<TransferId> ended;
    for (int each = 0; each < 20; ++each) {
        ended.push_back(from.engine.submit(peer, {{region.address, to.address(), region.nbytes}}));
    }
    auto map = std::make_shared<const BlockMap>(
        std::vector<PoolPair>{{region.address, 4096, 16, to.address(), 4096, 16, {{0, 0, 4096}}}});
    ended.push_back(from.engine.submit_blocks(peer, {map, {0}, {1}}));
    from.engine.deregister_memory(registration);
    std::fill(other.begin(), other.end(), std::uint8_t{9});
    std::size_t failed = 0;
    std::map<TransferId, Completion> completions;
    CHECK(eventually([&] {
        for (auto &each : from.engine.collect()) completions[each.id] = each;
        return completions.size() == ended.size() + 1;
    }));
    for (const auto id : ended) failed += completions[id].error == "its memory was deregistered";
    CHECK(failed > 0 && completions[stays].ok);
    CHECK(std::find(to.memory.begin(), to.memory.begin() + (64 << 10), 9) == to.memory.begin() + (64 << 10));
    CHECK(message_of<Error>([&] { from.engine.submit(peer, {{region.address, to.address(), 1}}); })
              .starts_with("this side has not registered"));
}

void many_threads_and_peers() {
    EngineOptions options = small_pieces({{"again_every", "3"}}, 2);
    options.pieces = {16 << 10, 2, 4};
    Side from(options);
    std::vector<std::unique_ptr<Side>> targets;
    std::vector<PeerId> peers;
    for (std::size_t index = 0; index < 3; ++index) {
        targets.push_back(std::make_unique<Side>(small_pieces()));
        peers.push_back(meet(from, *targets.back()));
    }
    std::atomic<std::size_t> ended = 0;
    std::vector<std::thread> threads;
    for (std::size_t index = 0; index < 3; ++index) {
        threads.emplace_back([&, index] {
            for (std::size_t round = 0; round < 20; ++round) {
                const auto id = from.engine.submit(peers[index], part(from, *targets[index], round));
                if (round % 5 == 4) from.engine.cancel(id, "enough");
                ended += from.engine.collect().size();
            }
        });
    }
    for (auto &thread : threads) thread.join();
    CHECK(eventually([&] { return (ended += from.engine.collect().size()) == 60; }));
}

void a_target_that_closes_breaks_nobody() {
    Side from(small_pieces({{"delay_us", "1000"}}));
    auto to = std::make_unique<Side>();
    const auto id = from.engine.submit(meet(from, *to), whole(from, *to, 64));
    CHECK(eventually([&] { return from.engine.bytes_done(id).value_or(1) > 0; }));
    to.reset();
    const auto end = from.wait(id);
    CHECK(!end.ok && end.error == "the peer is closed");
}

void bad_options_and_registrations_leave_nothing() {
    CHECK(message_of<Error>([] { Side(small_pieces({{"speed", "9"}})); }).starts_with("there is no option speed"));
    EngineOptions huge;
    huge.staging_bytes = std::uint64_t{1} << 60;
    CHECK(message_of<Error>([&] { Side{huge}; }).ends_with("does not fit memory"));
    CHECK(message_of<Error>([] { Side(small_pieces({{"refuse_registration", "1"}})); }) ==
          "asked to refuse registration");
}

}  // namespace

int main() {
    bytes_arrive(1, {});
    bytes_arrive(2, {});
    bytes_arrive(2, {{"again_every", "2"}});
    bytes_arrive(1, {{"delay_us", "300"}});
    block_lists_arrive(0);
    block_lists_arrive(1 << 20);
    small_blocks_are_gathered(1 << 20);
    small_blocks_are_gathered(4096);
    shared_memory_is_copied_to_by_all_lanes();
    what_is_not_registered_is_refused();
    failures_end_a_transfer_once();
    cancellation_ends_once_nothing_is_in_flight();
    deregistering_ends_what_would_be_read_from_there();
    short_segments_are_scattered_by_the_target({});
    short_segments_are_scattered_by_the_target({{"delay_us", "300"}, {"again_every", "2"}});
    nothing_is_placed_once_a_scattered_transfer_is_over();
    what_the_target_no_longer_has_is_refused_and_told();
    many_writers_have_slots_of_their_own_and_a_target_that_leaves_ends_them();
    damaged_runs_and_notices_are_refused();
    copiers_share_a_transfer();
    copiers_are_cancelled_and_closed();
    many_threads_and_peers();
    a_target_that_closes_breaks_nobody();
    bad_options_and_registrations_leave_nothing();
    std::puts("engine: all fine");
}
