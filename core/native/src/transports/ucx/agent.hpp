// One-sided writes over UCX: puts into a peer's registered memory, and a flush that says when they are there.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "endpoint.hpp"
#include "memory.hpp"
#include "worker.hpp"

namespace kvferry::ucx {

// One post: its puts, and the flush behind them.
struct Operation {
    std::uint64_t post = 0;
    std::uint64_t peer = 0;
    unsigned pending = 0;
    ucs_status_t status = UCS_OK;
    // The peer is dead, and this was reported. UCX may still hold requests of it: over shared memory it does not give
    // them back when an endpoint is closed by force.
    bool abandoned = false;
    bool reported = false;

    bool over() const { return pending == 0 || abandoned; }
    // Count in what UCX returned for one request.
    void begin(ucs_status_ptr_t request);
    void settle(ucs_status_t result);
};

class UcxAgent {
public:
    explicit UcxAgent(const OptionMap &options);
    ~UcxAgent();

    std::uint64_t register_memory(const kvferry_region &region) { return memory_.add(region); }
    void deregister_memory(std::uint64_t registration) { memory_.remove(registration); }
    std::vector<std::uint8_t> describe() const;
    std::uint64_t connect(std::span<const std::uint8_t> descriptor);
    void disconnect(std::uint64_t peer, bool dead);
    kvferry_status post(std::uint64_t peer, std::uint64_t post, std::span<const kvferry_segment> segments);
    std::size_t progress(std::span<kvferry_completion> completions);
    int wakeup_fd() const { return worker_.wakeup_fd(); }
    kvferry_status arm() const { return worker_.arm() ? KVFERRY_OK : KVFERRY_AGAIN; }
    void notify(std::uint64_t peer, std::span<const std::uint8_t> message);
    std::deque<std::vector<std::uint8_t>> &notices() { return notices_; }

private:
    struct Peer {
        std::vector<std::uint8_t> address;
        std::vector<RemoteRegion> regions;
        std::unique_ptr<Endpoint> endpoint;
        unsigned in_flight = 0;
        // Disconnected; it goes when nothing is in flight.
        bool left = false;
    };

    Peer &peer(std::uint64_t id);
    Endpoint &endpoint(Peer &peer);
    void put(Operation &operation, const Endpoint &endpoint, const kvferry_segment &segment);
    void flush(Operation &operation, const Endpoint &endpoint);
    void report(Operation &operation, kvferry_completion &completion);
    void retire(const Operation &operation);
    void receive_notices();

    // Requests that UCX takes back at a worker's end still point at their operations: these go last.
    std::vector<std::unique_ptr<Operation>> operations_;
    std::deque<std::vector<std::uint8_t>> notices_;
    Worker worker_;
    LocalMemory memory_;
    std::uint64_t last_ = 0;
    std::unordered_map<std::uint64_t, Peer> peers_;
};

}  // namespace kvferry::ucx
