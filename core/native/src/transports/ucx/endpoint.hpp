// One connection to a peer, with the keys to its memory. UCX never mends an endpoint that broke: it is made anew.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "memory.hpp"
#include "worker.hpp"

namespace kvferry::ucx {

class Endpoint {
public:
    // Raises KVFERRY_UNREACHABLE if UCX cannot reach that address, KVFERRY_INVALID if it or a key is damaged.
    Endpoint(const Worker &worker, std::span<const std::uint8_t> address, const std::vector<RemoteRegion> &regions);
    // Closes without a flush: whoever wants one has waited for it.
    ~Endpoint();
    Endpoint(const Endpoint &) = delete;

    ucp_ep_h get() const { return endpoint_; }
    bool broken() const { return broken_; }
    ucp_rkey_h key(std::uint64_t address, std::uint64_t nbytes) const;

private:
    struct Key {
        std::uint64_t address;
        std::uint64_t nbytes;
        ucp_rkey_h handle;
    };

    void unpack(const std::vector<RemoteRegion> &regions);
    void close();

    const Worker &worker_;
    ucp_ep_h endpoint_ = nullptr;
    std::vector<Key> keys_;
    bool broken_ = false;
};

}  // namespace kvferry::ucx
