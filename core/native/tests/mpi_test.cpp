// The engine over MPI, as each of the two processes that mpiexec starts; built plain and under AddressSanitizer.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "check.hpp"
#include "core/byte_stream.hpp"
#include "core/engine.hpp"

using namespace kvferry;

namespace {

constexpr std::size_t kBytes = 8 << 20;
constexpr std::size_t kCounts[] = {1, 16, 2048};

EngineOptions options() {
    EngineOptions options;
    options.pieces = {256 << 10, 32, 4};
    return options;
}

std::uint8_t pattern(std::size_t index, std::size_t count) { return static_cast<std::uint8_t>(index * 31 + count); }

struct Side {
    std::vector<std::uint8_t> memory = std::vector<std::uint8_t>(kBytes);
    Engine engine;
    PeerId peer = 0;
    std::uint64_t there = 0;
    std::string folder;

    explicit Side(const char *transport) : engine(TransportLibrary::load(transport), options()) {
        engine.register_memory({{address(), kBytes, KVFERRY_CPU, 0}});
        engine.set_active(true);
    }

    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(memory.data()); }

    void say(const std::string &word) const { std::ofstream(folder + "/" + word).flush(); }
    void await(const std::string &word) const {
        CHECK(eventually([&] { return std::filesystem::exists(folder + "/" + word); }));
    }

    // Through files: each side writes its own and waits for the other's.
    void meet(const std::string &where, int rank) {
        folder = where;
        ByteWriter out;
        out.bytes(engine.descriptor());
        out.number(address());
        const auto mine = out.take();
        const std::string path = folder + "/" + std::to_string(rank), other = folder + "/" + std::to_string(1 - rank);
        std::ofstream(path + ".new", std::ios::binary).write(reinterpret_cast<const char *>(mine.data()), mine.size());
        std::filesystem::rename(path + ".new", path);
        CHECK(eventually([&] { return std::filesystem::exists(other); }));
        std::ifstream file(other, std::ios::binary);
        const std::vector<char> theirs((std::istreambuf_iterator<char>(file)), {});
        ByteReader in({reinterpret_cast<const std::uint8_t *>(theirs.data()), theirs.size()});
        const auto descriptor = in.bytes();
        peer = engine.connect(descriptor, FileDescriptor(-1));
        there = in.number<std::uint64_t>();
    }

    TransferId write(std::size_t count) {
        std::vector<Segment> segments;
        for (std::size_t index = 0; index < count; ++index) {
            const std::size_t at = (index * 7919 % count) * (kBytes / count);
            segments.push_back({address() + at, there + at, kBytes / count});
        }
        return engine.submit(peer, segments);
    }

    Completion end_of(TransferId id) {
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

void write_and_have_it_checked(Side &side) {
    for (const std::size_t count : kCounts) {
        for (std::size_t index = 0; index < kBytes; ++index) side.memory[index] = pattern(index, count);
        CHECK(side.end_of(side.write(count)).ok);
        side.say("written-" + std::to_string(count));
        side.await("right-" + std::to_string(count));
    }
}

void check_what_is_written(Side &side) {
    for (const std::size_t count : kCounts) {
        side.await("written-" + std::to_string(count));
        bool is_right = true;
        for (std::size_t index = 0; index < kBytes; ++index) is_right &= side.memory[index] == pattern(index, count);
        CHECK(is_right);
        side.say("right-" + std::to_string(count));
    }
}

void outlive_the_other(Side &side) {
    std::vector<TransferId> ids;
    for (int round = 0; round < 8; ++round) ids.push_back(side.write(512));
    side.say("die");
    std::size_t ended = 0;
    CHECK(eventually([&] { return (ended += side.engine.collect().size()) == ids.size(); }));
    // Later ones find nobody.
    Completion late{};
    CHECK(eventually([&] { return !(late = side.end_of(side.write(1))).ok; }));
    CHECK(late.error.find("restart both") != std::string::npos);
    side.engine.disconnect(side.peer);
}

}  // namespace

// mpi_test TRANSPORT FOLDER together|killed
int main(int count, char **arguments) {
    if (count != 4) return 2;
    const int rank = std::atoi(std::getenv("PMIX_RANK"));
    const std::string folder = std::string(arguments[2]) + "/" + std::getenv("PMIX_NAMESPACE");
    const bool kills = std::string(arguments[3]) == "killed";
    std::filesystem::create_directories(folder);
    Side side(arguments[1]);
    side.meet(folder, rank);
    if (rank == 0) {
        write_and_have_it_checked(side);
        if (kills) outlive_the_other(side);
    } else {
        check_what_is_written(side);
        if (kills) {
            side.await("die");
            ::kill(::getpid(), SIGKILL);
        }
    }
    const auto refusal = message_of<Error>([&] { const Side another{arguments[1]}; });
    CHECK(refusal.find("one agent of one lane") != std::string::npos);
    side.engine.close();
    if (rank != 0) return 0;
    std::filesystem::remove_all(folder);
    // mpiexec's status tells nothing where a death is tolerated.
    std::puts("mpi: all is well");
}
