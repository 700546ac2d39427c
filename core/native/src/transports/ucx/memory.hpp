// Registered memory: ours by its handle, a peer's by its remote key.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <map>
#include <vector>

#include "../../core/byte_stream.hpp"
#include "worker.hpp"

namespace kvferry::ucx {

class LocalMemory {
public:
    explicit LocalMemory(const Worker &worker) : worker_(worker) {}
    ~LocalMemory();
    LocalMemory(const LocalMemory &) = delete;

    std::uint64_t add(const kvferry_region &region);
    void remove(std::uint64_t registration);
    // The handle that covers these bytes, or null: UCX finds out by itself then.
    ucp_mem_h find(std::uint64_t address, std::uint64_t nbytes) const;
    // Addresses and packed remote keys of all that is registered.
    void describe(ByteWriter &out) const;

private:
    struct Registration {
        kvferry_region region;
        ucp_mem_h handle;
    };

    const Worker &worker_;
    std::uint64_t last_ = 0;
    std::map<std::uint64_t, Registration> registrations_;
};

struct RemoteRegion {
    std::uint64_t address;
    std::uint64_t nbytes;
    std::vector<std::uint8_t> packed_key;
};

std::vector<RemoteRegion> read_regions(ByteReader &in);

}  // namespace kvferry::ucx
