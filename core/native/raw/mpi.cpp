// Raw MPI, as the measure of what runs over it: `mpiexec -n 2 mpi NBYTES`. `kvferry_backends.mpi_raw` asks it.
//
// Rank 0 writes to rank 1. Once it has printed "ready PID PID", each line "WAY PIECES NBYTES SEED" on its stdin is a
// write of so many bytes in so many equal pieces, in order (seed 0) or both sides shuffled; the answer is the seconds
// until all is known to be there. WAY is "put" (MPI_Put into a dynamic window, until its flush) or "send" (a message for
// each piece, until the receiver's answer); "end" is the end, since mpiexec does not always pass on that of its input.
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kHugePage = 2 << 20;
constexpr std::size_t kLongest = 1 << 30;

enum Way : std::uint64_t { kEnd, kCompare, kPut, kSend };
enum Tag : int { kOrder, kData, kAnswer };

struct Order {
    std::uint64_t way, pieces, nbytes, seed;
};

[[noreturn]] void fail(const char *what) {
    std::fprintf(stderr, "raw MPI: %s\n", what);
    MPI_Abort(MPI_COMM_WORLD, 1);
    std::abort();
}

std::uint8_t pattern(std::size_t offset) { return static_cast<std::uint8_t>((offset * 2654435761u) >> 13); }

struct Piece {
    std::size_t offset, nbytes;
};

// Equal pieces, none longer than MPI can count.
std::vector<Piece> cut(const Order &order, std::uint64_t seed) {
    std::vector<std::size_t> numbers(order.pieces);
    std::iota(numbers.begin(), numbers.end(), std::size_t{0});
    if (seed != 0) std::shuffle(numbers.begin(), numbers.end(), std::mt19937(static_cast<unsigned>(seed)));
    const std::size_t each = order.nbytes / order.pieces;
    std::vector<Piece> pieces;
    for (const std::size_t number : numbers) {
        for (std::size_t done = 0; done < each; done += kLongest) {
            pieces.push_back({number * each + done, std::min(kLongest, each - done)});
        }
    }
    return pieces;
}

// Warm memory, as our pools have it, in a window.
class Node {
   public:
    explicit Node(std::size_t size) : nbytes_(size) {
        MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
        const std::size_t whole = (nbytes_ + kHugePage - 1) / kHugePage * kHugePage;
        buffer_ = static_cast<std::uint8_t *>(std::aligned_alloc(kHugePage, whole));
        if (buffer_ == nullptr) fail("there is not so much memory");
        ::madvise(buffer_, whole, MADV_HUGEPAGE);
        for (std::size_t offset = 0; offset < nbytes_; ++offset) buffer_[offset] = rank_ == 0 ? pattern(offset) : 0;
        MPI_Win_create_dynamic(MPI_INFO_NULL, MPI_COMM_WORLD, &window_);
        MPI_Win_attach(window_, buffer_, static_cast<MPI_Aint>(nbytes_));
        MPI_Aint here = 0;
        MPI_Get_address(buffer_, &here);
        MPI_Sendrecv(&here, 1, MPI_AINT, 1 - rank_, kOrder, &there_, 1, MPI_AINT, 1 - rank_, kOrder, MPI_COMM_WORLD,
                     MPI_STATUS_IGNORE);
        MPI_Win_lock_all(MPI_MODE_NOCHECK, window_);
    }
    ~Node() {
        MPI_Win_unlock_all(window_);
        MPI_Win_detach(window_, buffer_);
        MPI_Win_free(&window_);
        std::free(buffer_);
    }
    Node(const Node &) = delete;

    std::size_t nbytes() const { return nbytes_; }
    int rank() const { return rank_; }

    // Rank 1: say that all is there, and spoil it.
    void compare() {
        for (std::size_t offset = 0; offset < nbytes_; ++offset) {
            if (buffer_[offset] != pattern(offset)) fail("a write arrived wrong");
            buffer_[offset] = 0;
        }
        const long pid = ::getpid();
        MPI_Send(&pid, 1, MPI_LONG, 0, kAnswer, MPI_COMM_WORLD);
    }

    double write(const Order &order) const {
        const auto pieces = cut(order, order.seed), sinks = cut(order, 2 * order.seed);
        MPI_Send(&order, sizeof order, MPI_BYTE, 1, kOrder, MPI_COMM_WORLD);
        // The other is ready to receive.
        MPI_Recv(nullptr, 0, MPI_BYTE, 1, kAnswer, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        const double begun = MPI_Wtime();
        order.way == kPut ? put(pieces, sinks) : send(pieces);
        return MPI_Wtime() - begun;
    }

    // Rank 1: take part in one write.
    void take(const Order &order) const {
        std::vector<MPI_Request> requests;
        if (order.way == kSend) {
            for (const Piece &piece : cut(order, 2 * order.seed)) {
                MPI_Irecv(buffer_ + piece.offset, static_cast<int>(piece.nbytes), MPI_BYTE, 0, kData, MPI_COMM_WORLD,
                          &requests.emplace_back());
            }
        }
        MPI_Send(nullptr, 0, MPI_BYTE, 0, kAnswer, MPI_COMM_WORLD);
        if (order.way != kSend) return;
        MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
        MPI_Send(nullptr, 0, MPI_BYTE, 0, kAnswer, MPI_COMM_WORLD);
    }

   private:
    void put(const std::vector<Piece> &pieces, const std::vector<Piece> &sinks) const {
        for (std::size_t index = 0; index < pieces.size(); ++index) {
            const int nbytes = static_cast<int>(pieces[index].nbytes);
            MPI_Put(buffer_ + pieces[index].offset, nbytes, MPI_BYTE, 1,
                    MPI_Aint_add(there_, static_cast<MPI_Aint>(sinks[index].offset)), nbytes, MPI_BYTE, window_);
        }
        MPI_Win_flush(1, window_);
    }

    void send(const std::vector<Piece> &pieces) const {
        std::vector<MPI_Request> requests;
        for (const Piece &piece : pieces) {
            MPI_Isend(buffer_ + piece.offset, static_cast<int>(piece.nbytes), MPI_BYTE, 1, kData, MPI_COMM_WORLD,
                      &requests.emplace_back());
        }
        MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
        MPI_Recv(nullptr, 0, MPI_BYTE, 1, kAnswer, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }

    const std::size_t nbytes_;
    int rank_ = 0;
    std::uint8_t *buffer_ = nullptr;
    MPI_Win window_ = MPI_WIN_NULL;
    MPI_Aint there_ = 0;
};

// Write everything once, and have it compared; returns the other's process id.
long warm_up(const Node &node, Way way) {
    node.write({way, 1, node.nbytes(), 0});
    const Order compare{kCompare, 0, 0, 0};
    MPI_Send(&compare, sizeof compare, MPI_BYTE, 1, kOrder, MPI_COMM_WORLD);
    long pid = 0;
    MPI_Recv(&pid, 1, MPI_LONG, 1, kAnswer, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    return pid;
}

void serve_as_writer(const Node &node) {
    warm_up(node, kPut);
    std::printf("ready %d %ld\n", ::getpid(), warm_up(node, kSend));
    std::fflush(stdout);
    char way[5];
    std::size_t pieces = 0, nbytes = 0;
    for (unsigned seed = 0; std::scanf("%4s %zu %zu %u", way, &pieces, &nbytes, &seed) == 4;) {
        if (std::string(way) == "end") break;
        if (pieces == 0 || nbytes / pieces == 0 || nbytes > node.nbytes()) fail("no such pieces");
        std::printf("%.9f\n", node.write({std::string(way) == "put" ? kPut : kSend, pieces, nbytes, seed}));
        std::fflush(stdout);
    }
    const Order end{kEnd, 0, 0, 0};
    MPI_Send(&end, sizeof end, MPI_BYTE, 1, kOrder, MPI_COMM_WORLD);
}

void serve_as_target(Node &node) {
    for (;;) {
        Order order{};
        // Meanwhile MPI makes progress: a Put needs that.
        MPI_Recv(&order, sizeof order, MPI_BYTE, 0, kOrder, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (order.way == kEnd) return;
        if (order.way == kCompare) {
            node.compare();
        } else {
            node.take(order);
        }
    }
}

}  // namespace

int main(int count, char **arguments) {
    MPI_Init(&count, &arguments);
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    const std::size_t nbytes = count == 2 ? std::strtoull(arguments[1], nullptr, 10) : 0;
    if (size != 2 || nbytes == 0) fail("usage: mpiexec -n 2 mpi NBYTES");
    {
        Node node(nbytes);
        node.rank() == 0 ? serve_as_writer(node) : serve_as_target(node);
    }
    MPI_Finalize();
}
