// The engine over UCX between two processes; built plain and under AddressSanitizer.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "core/engine.hpp"

using namespace kvferry;

namespace {

constexpr std::size_t kBytes = 8 << 20;

struct Side {
    std::vector<std::uint8_t> memory;
    Engine engine;
    std::uint64_t registration;

    Side(const char *transport, std::size_t lanes)
        : memory(kBytes), engine(TransportLibrary::load(transport), options(lanes)),
          registration(engine.register_memory({{address(), kBytes, KVFERRY_CPU, 0}})) {}

    static EngineOptions options(std::size_t lanes) {
        EngineOptions options;
        options.lanes = lanes;
        options.pieces = {256 << 10, 32, 4};
        options.staging_bytes = 4 << 20;
        return options;
    }

    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(memory.data()); }
};

void move(int fd, void *bytes, std::size_t nbytes, bool out) {
    auto *at = static_cast<char *>(bytes);
    while (nbytes > 0) {
        const ssize_t moved = out ? ::write(fd, at, nbytes) : ::read(fd, at, nbytes);
        CHECK(moved > 0);
        at += moved;
        nbytes -= static_cast<std::size_t>(moved);
    }
}

// Tells its descriptor and address; then, each time it is asked, the sum of its memory.
[[noreturn]] void serve(const char *transport, int in, int out) {
    // A parent that fails leaves nobody behind.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    Side side(transport, 1);
    Bytes descriptor = side.engine.descriptor();
    std::uint64_t head[2] = {descriptor.size(), side.address()};
    move(out, head, sizeof head, true);
    move(out, descriptor.data(), descriptor.size(), true);
    while (true) {
        char command = 0;
        move(in, &command, 1, false);
        if (command == 'q') {
            side.engine.close();
            std::exit(0);
        }
        if (command == 'c') {
            std::uint64_t length = 0;
            move(in, &length, sizeof length, false);
            Bytes writer(length);
            move(in, writer.data(), length, false);
            side.engine.connect(writer, FileDescriptor());
            continue;
        }
        if (command == 'p') {
            std::uint64_t placed = side.engine.placed();
            move(out, &placed, sizeof placed, true);
            continue;
        }
        std::uint64_t sum = 0;
        for (std::size_t index = 0; index < kBytes; ++index) sum += side.memory[index] * (index % 251);
        move(out, &sum, sizeof sum, true);
    }
}

struct Target {
    pid_t pid;
    int from, to;
    std::uint64_t address = 0;
    Bytes descriptor;

    explicit Target(const char *transport) {
        int answers[2], commands[2];
        CHECK(::pipe(answers) == 0 && ::pipe(commands) == 0);
        pid = ::fork();
        if (pid == 0) serve(transport, commands[0], answers[1]);
        ::close(answers[1]);
        ::close(commands[0]);
        from = answers[0];
        to = commands[1];
    }

    void tell(char command) const { move(to, &command, 1, true); }

    std::uint64_t ask(char command) const {
        std::uint64_t answer = 0;
        tell(command);
        move(from, &answer, sizeof answer, false);
        return answer;
    }

    void know(Engine &writer) const {
        Bytes theirs = writer.descriptor();
        std::uint64_t length = theirs.size();
        tell('c');
        move(to, &length, sizeof length, true);
        move(to, theirs.data(), length, true);
    }

    void greet() {
        std::uint64_t head[2];
        move(from, head, sizeof head, false);
        descriptor.resize(head[0]);
        move(from, descriptor.data(), descriptor.size(), false);
        address = head[1];
    }

    FileDescriptor process() const { return FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))); }
};

std::vector<Segment> pieces(const Side &from, const Target &to, std::size_t count) {
    std::vector<Segment> segments;
    const std::size_t each = kBytes / count;
    for (std::size_t index = 0; index < count; ++index) {
        const std::size_t at = (index * 7919 % count) * each;
        segments.push_back({from.address() + at, to.address + at, each});
    }
    return segments;
}

Completion wait(Engine &engine, TransferId id) {
    std::optional<Completion> found;
    CHECK(eventually([&] {
        for (auto &completion : engine.collect()) {
            if (completion.id == id) found = completion;
        }
        return found.has_value();
    }));
    return *found;
}

void bytes_arrive(Side &writer, Target &target, PeerId peer) {
    for (std::size_t count : {1, 16, 2048}) {
        std::uint64_t expected = 0;
        for (std::size_t index = 0; index < kBytes; ++index) {
            writer.memory[index] = static_cast<std::uint8_t>(index * 31 + count);
            expected += writer.memory[index] * (index % 251);
        }
        const auto id = writer.engine.submit(peer, pieces(writer, target, count));
        CHECK(wait(writer.engine, id).ok);
        CHECK(target.ask('s') == expected);
    }
}

// Pieces of 1 KiB, of which every second place of the target gets one.
void short_segments_are_scattered(const char *transport, Target &target) {
    Side writer(transport, 1);
    const PeerId peer = writer.engine.connect(target.descriptor, target.process());
    target.know(writer.engine);
    constexpr std::size_t kPiece = 1 << 10, kCount = kBytes / kPiece / 2;
    std::vector<Segment> segments;
    for (std::size_t index = 0; index < kCount; ++index) {
        segments.push_back({writer.address() + index * kPiece, target.address + (index * 7919 % kCount) * 2 * kPiece, kPiece});
    }
    const Segment zeros{writer.address(), target.address, kBytes};
    CHECK(wait(writer.engine, writer.engine.submit(peer, {zeros})).ok);
    CHECK(eventually([&] {
        for (std::size_t index = 0; index < kBytes; ++index) writer.memory[index] = static_cast<std::uint8_t>(index * 13 + 1);
        CHECK(wait(writer.engine, writer.engine.submit(peer, segments)).ok);
        return target.ask('p') > 0;
    }));
    std::uint64_t sum = 0;
    for (const Segment &segment : segments) {
        for (std::size_t index = 0; index < kPiece; ++index) {
            const std::size_t there = segment.dst - target.address + index;
            sum += writer.memory[segment.src - writer.address() + index] * (there % 251);
        }
    }
    CHECK(target.ask('s') == sum);
    writer.engine.disconnect(peer);
}

void a_killed_target_ends_its_transfers(Side &writer, Target &target, PeerId peer) {
    std::vector<TransferId> ids;
    for (int round = 0; round < 8; ++round) ids.push_back(writer.engine.submit(peer, pieces(writer, target, 512)));
    ::kill(target.pid, SIGKILL);
    ::waitpid(target.pid, nullptr, 0);
    std::size_t ended = 0;
    CHECK(eventually([&] { return (ended += writer.engine.collect().size()) == ids.size(); }));
    CHECK(message_of<Error>([&] { writer.engine.submit(peer, pieces(writer, target, 1)); }) ==
          "the peer is gone: its process ended");
    writer.engine.disconnect(peer);
}

}  // namespace

int main(int count, char **arguments) {
    if (count != 2) return 2;
    // UCX and threads come after the forks.
    Target first(arguments[1]), second(arguments[1]);
    first.greet();
    second.greet();
    Side writer(arguments[1], 2);
    const PeerId to_first = writer.engine.connect(first.descriptor, first.process());
    const PeerId to_second = writer.engine.connect(second.descriptor, second.process());
    bytes_arrive(writer, first, to_first);
    a_killed_target_ends_its_transfers(writer, first, to_first);
    bytes_arrive(writer, second, to_second);
    short_segments_are_scattered(arguments[1], second);
    CHECK(wait(writer.engine, writer.engine.submit(to_second, {})).ok);
    second.tell('q');
    int status = 0;
    ::waitpid(second.pid, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    writer.engine.disconnect(to_second);
    writer.engine.deregister_memory(writer.registration);
    writer.engine.close();
    std::puts("ucx: all fine");
}
