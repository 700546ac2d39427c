// One-sided writes over NIXL's UCX plugin, without its progress thread, which would spin a core for ever.
#pragma once

#include <deque>
#include <map>
#include <span>
#include <vector>

#include "../../core/byte_stream.hpp"
#include "../adapter.hpp"
#include "api.hpp"

namespace kvferry::nixl {

class NixlAgent {
public:
    explicit NixlAgent(const OptionMap &options);
    ~NixlAgent();

    std::uint64_t register_memory(const kvferry_region &region);
    void deregister_memory(std::uint64_t registration);
    std::vector<std::uint8_t> describe() const;
    std::uint64_t connect(std::span<const std::uint8_t> descriptor);
    void disconnect(std::uint64_t peer, bool dead);
    kvferry_status post(std::uint64_t peer, std::uint64_t post, std::span<const kvferry_segment> segments);
    std::size_t progress(std::span<kvferry_completion> completions);
    // NIXL has none: a busy lane asks again and again, an idle one not at all.
    int wakeup_fd() const { return -1; }
    kvferry_status arm() const { return KVFERRY_OK; }
    void notify(std::uint64_t peer, std::span<const std::uint8_t> message);
    std::deque<std::vector<std::uint8_t>> &notices() { return notices_; }

private:
    struct Region {
        kvferry_region region;
        Handle list;
    };
    struct Peer {
        std::string name;
        std::vector<std::uint8_t> metadata;
        // NIXL writes to one kind of memory and one device in a request; a peer's is told with its regions.
        std::vector<kvferry_region> regions;
        unsigned in_flight = 0;
        // NIXL gave the connection up; it comes back only by loading the metadata again.
        bool broken = false;
        bool left = false;
    };
    struct Request {
        std::uint64_t post;
        std::uint64_t peer;
        Handle handle;
    };

    Peer &peer(std::uint64_t id);
    std::string load(const std::vector<std::uint8_t> &metadata);
    Handle make_request(const Peer &peer, std::span<const kvferry_segment> segments);
    int end(const Request &request, int status);
    void receive_notices();

    const Api &api_;
    Handle agent_ = nullptr;
    Handle options_ = nullptr;
    std::uint64_t last_ = 0;
    std::map<std::uint64_t, Region> regions_;
    std::map<std::uint64_t, Peer> peers_;
    std::vector<Request> requests_;
    std::vector<std::pair<std::uint64_t, int>> ended_;
    std::deque<std::vector<std::uint8_t>> notices_;
};

}  // namespace kvferry::nixl
