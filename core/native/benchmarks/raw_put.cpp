// Raw UCP: one-sided puts between two processes, as fast as the tool goes by itself. A baseline, not a tool.
//
// It forks; the child is the target. For each line "PIECES spin" or "PIECES nap" on stdin it writes all bytes in so many
// pieces, flushes, and prints the seconds. Meanwhile the target makes progress without a pause, or once a millisecond:
// CMA needs no more, and where cores or memory are short a target that spins costs the writer half its speed.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

void require(ucs_status_t status, const char *what) {
    if (status == UCS_OK) return;
    std::fprintf(stderr, "raw_put: %s: %s\n", what, ucs_status_string(status));
    std::exit(1);
}

void transfer(int fd, void *bytes, std::size_t nbytes, bool out) {
    auto *at = static_cast<char *>(bytes);
    while (nbytes > 0) {
        const ssize_t moved = out ? ::write(fd, at, nbytes) : ::read(fd, at, nbytes);
        if (moved <= 0) std::exit(1);
        at += moved;
        nbytes -= static_cast<std::size_t>(moved);
    }
}

struct Node {
    ucp_context_h context = nullptr;
    ucp_worker_h worker = nullptr;
    ucp_mem_h memory = nullptr;
    std::uint8_t *buffer = nullptr;

    explicit Node(std::size_t nbytes) {
        ucp_params_t params{};
        params.field_mask = UCP_PARAM_FIELD_FEATURES;
        params.features = UCP_FEATURE_RMA;
        require(ucp_init(&params, nullptr, &context), "init");
        ucp_worker_params_t worker_params{};
        worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
        worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
        require(ucp_worker_create(context, &worker_params, &worker), "worker");
        buffer = static_cast<std::uint8_t *>(std::aligned_alloc(2 << 20, nbytes));
        // As NumPy and our pools ask for it; CMA is twice as fast on huge pages.
        ::madvise(buffer, nbytes, MADV_HUGEPAGE);
        std::memset(buffer, 1, nbytes);
        ucp_mem_map_params_t map{};
        map.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
        map.address = buffer;
        map.length = nbytes;
        require(ucp_mem_map(context, &map, &memory), "map");
    }
};

void target(std::size_t nbytes, int in, int out) {
    Node node(nbytes);
    ucp_address_t *address = nullptr;
    std::size_t sizes[2] = {};
    void *key = nullptr;
    require(ucp_worker_get_address(node.worker, &address, &sizes[0]), "address");
    require(ucp_rkey_pack(node.context, node.memory, &key, &sizes[1]), "key");
    transfer(out, sizes, sizeof sizes, true);
    transfer(out, address, sizes[0], true);
    transfer(out, key, sizes[1], true);
    transfer(out, &node.buffer, sizeof node.buffer, true);
    ::fcntl(in, F_SETFL, O_NONBLOCK);
    char state = 'e';
    while (true) {
        pollfd entry{in, POLLIN, 0};
        if (::poll(&entry, 1, state == 's' ? 0 : state == 'n' ? 1 : -1) > 0 && ::read(in, &state, 1) <= 0) return;
        for (int call = 0; state != 'e' && call < 100; ++call) ucp_worker_progress(node.worker);
    }
}

void wait(ucp_worker_h worker, ucs_status_ptr_t request, const char *what) {
    if (UCS_PTR_IS_ERR(request)) require(UCS_PTR_STATUS(request), what);
    if (request == nullptr) return;
    while (ucp_request_check_status(request) == UCS_INPROGRESS) ucp_worker_progress(worker);
    require(ucp_request_check_status(request), what);
    ucp_request_free(request);
}

void writer(std::size_t nbytes, int in, int out) {
    Node node(nbytes);
    std::size_t sizes[2] = {};
    transfer(in, sizes, sizeof sizes, false);
    std::vector<char> address(sizes[0]), packed(sizes[1]);
    transfer(in, address.data(), sizes[0], false);
    transfer(in, packed.data(), sizes[1], false);
    std::uint8_t *there = nullptr;
    transfer(in, &there, sizeof there, false);
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
    params.address = reinterpret_cast<ucp_address_t *>(address.data());
    ucp_ep_h endpoint = nullptr;
    ucp_rkey_h key = nullptr;
    require(ucp_ep_create(node.worker, &params, &endpoint), "endpoint");
    require(ucp_ep_rkey_unpack(endpoint, packed.data(), &key), "key");
    std::printf("ready\n");
    std::fflush(stdout);
    std::size_t pieces = 0;
    char target_state[5];
    while (std::scanf("%zu %4s", &pieces, target_state) == 2) {
        transfer(out, target_state, 1, true);
        const auto start = std::chrono::steady_clock::now();
        ucp_request_param_t put{};
        std::vector<ucs_status_ptr_t> requests;
        for (std::size_t index = 0, each = nbytes / pieces; index < pieces; ++index) {
            requests.push_back(ucp_put_nbx(endpoint, node.buffer + index * each, each,
                                           reinterpret_cast<std::uint64_t>(there) + index * each, key, &put));
        }
        for (auto request : requests) wait(node.worker, request, "put");
        wait(node.worker, ucp_ep_flush_nbx(endpoint, &put), "flush");
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        transfer(out, const_cast<char *>("e"), 1, true);
        std::printf("%.6f\n", seconds.count());
        std::fflush(stdout);
    }
}

}  // namespace

int main(int count, char **arguments) {
    const std::size_t nbytes = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 256u << 20;
    int to_target[2], to_writer[2];
    if (::pipe(to_target) != 0 || ::pipe(to_writer) != 0) return 1;
    if (::fork() == 0) {
        ::close(to_target[1]);
        target(nbytes, to_target[0], to_writer[1]);
        std::_Exit(0);
    }
    ::close(to_target[0]);
    writer(nbytes, to_writer[0], to_target[1]);
    // Without the ceremony of an orderly end: the kernel takes everything back.
    std::_Exit(0);
}
