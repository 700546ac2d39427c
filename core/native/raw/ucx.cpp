// Raw UCP, as the measure of what runs over it: one-sided puts between two processes. `kvferry_backends.ucx_raw` asks it.
//
// It forks: the child is the target. Once "ready PID-OF-TARGET" is printed, each line "TARGET PIECES NBYTES SEED" on
// stdin is a write of so many bytes in so many equal pieces, in order (seed 0) or both sides shuffled; the answer is
// the seconds from the first put to the end of the flush. Meanwhile the target makes progress without a pause ("spin"),
// or once a millisecond ("nap"): CMA needs no more, and where cores are short a target that spins slows its writer.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
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

enum class Order : char { kRest = 'r', kSpin = 's', kNap = 'n', kCompare = 'c' };

[[noreturn]] void fail(const char *what, const char *why) {
    std::fprintf(stderr, "raw UCP: %s: %s\n", what, why);
    std::exit(1);
}

void require(ucs_status_t status, const char *what) {
    if (status != UCS_OK) fail(what, ucs_status_string(status));
}

// A stopped orphan would stay for ever.
void die_with_parent() { ::prctl(PR_SET_PDEATHSIG, SIGKILL); }

void send(int fd, const void *bytes, std::size_t nbytes) {
    for (const char *at = static_cast<const char *>(bytes); nbytes > 0;) {
        const ssize_t moved = ::write(fd, at, nbytes);
        if (moved <= 0) fail("the other process", "is gone");
        at += moved;
        nbytes -= static_cast<std::size_t>(moved);
    }
}

void receive(int fd, void *bytes, std::size_t nbytes) {
    for (char *at = static_cast<char *>(bytes); nbytes > 0;) {
        const ssize_t moved = ::read(fd, at, nbytes);
        if (moved <= 0) fail("the other process", "is gone");
        at += moved;
        nbytes -= static_cast<std::size_t>(moved);
    }
}

std::uint8_t pattern(std::size_t offset) { return static_cast<std::uint8_t>((offset * 2654435761u) >> 13); }

// A worker and registered, warm memory.
struct Node {
    ucp_context_h context = nullptr;
    ucp_worker_h worker = nullptr;
    ucp_mem_h memory = nullptr;
    std::uint8_t *buffer = nullptr;
    std::size_t nbytes;

    explicit Node(std::size_t size) : nbytes(size) {
        ucp_params_t params{};
        params.field_mask = UCP_PARAM_FIELD_FEATURES;
        params.features = UCP_FEATURE_RMA;
        require(ucp_init(&params, nullptr, &context), "init");
        ucp_worker_params_t worker_params{};
        worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
        worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
        require(ucp_worker_create(context, &worker_params, &worker), "worker");
        const std::size_t whole = (nbytes + kHugePage - 1) / kHugePage * kHugePage;
        buffer = static_cast<std::uint8_t *>(std::aligned_alloc(kHugePage, whole));
        if (buffer == nullptr) fail("memory", "there is not so much");
        // As our pools ask for it; CMA is twice as fast on huge pages.
        ::madvise(buffer, whole, MADV_HUGEPAGE);
        std::memset(buffer, 0, nbytes);
        ucp_mem_map_params_t map{};
        map.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
        map.address = buffer;
        map.length = nbytes;
        require(ucp_mem_map(context, &map, &memory), "registration");
    }
};

// --- target -----------------------------------------------------------------------------------------------------

void introduce(const Node &node, int out) {
    ucp_address_t *address = nullptr;
    std::size_t sizes[2] = {};
    void *key = nullptr;
    require(ucp_worker_get_address(node.worker, &address, &sizes[0]), "address");
    require(ucp_rkey_pack(node.context, node.memory, &key, &sizes[1]), "key");
    send(out, sizes, sizeof sizes);
    send(out, address, sizes[0]);
    send(out, key, sizes[1]);
    send(out, &node.buffer, sizeof node.buffer);
}

bool holds_pattern(const Node &node) {
    for (std::size_t offset = 0; offset < node.nbytes; ++offset) {
        if (node.buffer[offset] != pattern(offset)) return false;
    }
    return true;
}

void serve_as_target(std::size_t nbytes, int in, int out) {
    const Node node(nbytes);
    introduce(node, out);
    for (Order order = Order::kRest;;) {
        pollfd entry{in, POLLIN, 0};
        const int patience = order == Order::kSpin ? 0 : order == Order::kNap ? 1 : -1;
        if (::poll(&entry, 1, patience) > 0 && ::read(in, &order, 1) <= 0) return;
        if (order == Order::kCompare) {
            const bool is_right = holds_pattern(node);
            send(out, &is_right, sizeof is_right);
            order = Order::kRest;
        }
        for (int call = 0; order != Order::kRest && call < 100; ++call) ucp_worker_progress(node.worker);
    }
}

// --- writer -----------------------------------------------------------------------------------------------------

class Writer {
   public:
    Writer(std::size_t nbytes, int in, int out) : node_(nbytes), in_(in), out_(out) {
        for (std::size_t offset = 0; offset < nbytes; ++offset) node_.buffer[offset] = pattern(offset);
        std::size_t sizes[2] = {};
        receive(in_, sizes, sizeof sizes);
        std::vector<char> address(sizes[0]), packed(sizes[1]);
        receive(in_, address.data(), address.size());
        receive(in_, packed.data(), packed.size());
        receive(in_, &there_, sizeof there_);
        ucp_ep_params_t params{};
        params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
        params.address = reinterpret_cast<ucp_address_t *>(address.data());
        require(ucp_ep_create(node_.worker, &params, &endpoint_), "endpoint");
        require(ucp_ep_rkey_unpack(endpoint_, packed.data(), &key_), "key");
    }

    // Write everything once, and have it compared.
    void warm_up() {
        write(Order::kSpin, 1, node_.nbytes, 0);
        order(Order::kCompare);
        bool is_right = false;
        receive(in_, &is_right, sizeof is_right);
        if (!is_right) fail("a write", "it arrived wrong");
    }

    double write(Order target, std::size_t pieces, std::size_t nbytes, unsigned seed) {
        if (pieces == 0 || nbytes / pieces == 0 || nbytes > node_.nbytes) fail("a write", "no such pieces");
        const auto sources = offsets(pieces, nbytes / pieces, seed), sinks = offsets(pieces, nbytes / pieces, 2 * seed);
        requests_.clear();
        requests_.reserve(pieces);
        ucp_request_param_t plain{}, put{};
        put.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH;
        put.memh = node_.memory;
        order(target);
        const auto start = std::chrono::steady_clock::now();
        for (std::size_t index = 0; index < pieces; ++index) {
            requests_.push_back(ucp_put_nbx(endpoint_, node_.buffer + sources[index], nbytes / pieces,
                                            there_ + sinks[index], key_, &put));
        }
        for (auto request : requests_) wait(request, "put");
        wait(ucp_ep_flush_nbx(endpoint_, &plain), "flush");
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        order(Order::kRest);
        return seconds.count();
    }

   private:
    static std::vector<std::size_t> offsets(std::size_t pieces, std::size_t each, unsigned seed) {
        std::vector<std::size_t> order(pieces);
        std::iota(order.begin(), order.end(), std::size_t{0});
        if (seed != 0) std::shuffle(order.begin(), order.end(), std::mt19937(seed));
        for (auto &offset : order) offset *= each;
        return order;
    }

    void order(Order what) { send(out_, &what, sizeof what); }

    void wait(ucs_status_ptr_t request, const char *what) {
        if (UCS_PTR_IS_ERR(request)) require(UCS_PTR_STATUS(request), what);
        if (request == nullptr) return;
        while (ucp_request_check_status(request) == UCS_INPROGRESS) ucp_worker_progress(node_.worker);
        require(ucp_request_check_status(request), what);
        ucp_request_free(request);
    }

    Node node_;
    int in_, out_;
    std::uint64_t there_ = 0;
    ucp_ep_h endpoint_ = nullptr;
    ucp_rkey_h key_ = nullptr;
    std::vector<ucs_status_ptr_t> requests_;
};

void serve_as_writer(std::size_t nbytes, int in, int out, pid_t target) {
    Writer writer(nbytes, in, out);
    writer.warm_up();
    std::printf("ready %d\n", target);
    std::fflush(stdout);
    char way[5];
    std::size_t pieces = 0, length = 0;
    for (unsigned seed = 0; std::scanf("%4s %zu %zu %u", way, &pieces, &length, &seed) == 4;) {
        const Order order = std::string(way) == "spin" ? Order::kSpin : Order::kNap;
        std::printf("%.9f\n", writer.write(order, pieces, length, seed));
        std::fflush(stdout);
    }
}

}  // namespace

int main(int count, char **arguments) {
    const std::size_t nbytes = count == 2 ? std::strtoull(arguments[1], nullptr, 10) : 0;
    if (nbytes == 0) fail("usage", "ucx NBYTES");
    die_with_parent();
    int to_target[2], to_writer[2];
    if (::pipe(to_target) != 0 || ::pipe(to_writer) != 0) fail("pipe", std::strerror(errno));
    const pid_t target = ::fork();
    if (target < 0) fail("fork", std::strerror(errno));
    if (target == 0) {
        die_with_parent();
        ::close(to_target[1]);
        serve_as_target(nbytes, to_target[0], to_writer[1]);
    } else {
        ::close(to_target[0]);
        ::close(to_writer[1]);
        serve_as_writer(nbytes, to_writer[0], to_target[1], target);
    }
    // Without the ceremony of an orderly end: the kernel takes everything back.
    std::_Exit(0);
}
