#include "memory.hpp"

#include "status.hpp"

namespace kvferry::ucx {

namespace {

// Said, not left to UCX to find out: it knows only allocations that it has seen being made.
ucs_memory_type_t memory_type(const Worker &worker, const kvferry_region &region) {
    if (region.device_kind == KVFERRY_CPU) return UCS_MEMORY_TYPE_HOST;
    ucp_context_attr_t attributes{};
    attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
    require(ucp_context_query(worker.context(), &attributes), "UCX does not say what memory it can reach");
    if ((attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) == 0) {
        throw Error(KVFERRY_UNAVAILABLE,
                    "UCX reaches no CUDA memory here: UCX_TLS, if set, must name cuda_copy and cuda_ipc beside tcp");
    }
    return UCS_MEMORY_TYPE_CUDA;
}

}  // namespace

LocalMemory::~LocalMemory() {
    for (const auto &[id, registration] : registrations_) ucp_mem_unmap(worker_.context(), registration.handle);
}

std::uint64_t LocalMemory::add(const kvferry_region &region) {
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                        UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
    params.memory_type = memory_type(worker_, region);
    params.address = reinterpret_cast<void *>(region.address);
    params.length = region.nbytes;
    ucp_mem_h handle = nullptr;
    require(ucp_mem_map(worker_.context(), &params, &handle),
            "UCX cannot register " + std::to_string(region.nbytes) + " bytes");
    registrations_.emplace(++last_, Registration{region, handle});
    return last_;
}

void LocalMemory::remove(std::uint64_t registration) {
    const auto found = registrations_.find(registration);
    if (found == registrations_.end()) throw Error(KVFERRY_INVALID, "UCX holds no such registration");
    const ucp_mem_h handle = found->second.handle;
    registrations_.erase(found);
    require(ucp_mem_unmap(worker_.context(), handle), "UCX cannot deregister");
}

ucp_mem_h LocalMemory::find(std::uint64_t address, std::uint64_t nbytes) const {
    for (const auto &[id, registration] : registrations_) {
        const std::uint64_t offset = address - registration.region.address;
        if (offset <= registration.region.nbytes && nbytes <= registration.region.nbytes - offset) {
            return registration.handle;
        }
    }
    return nullptr;
}

void LocalMemory::describe(ByteWriter &out) const {
    out.number(static_cast<std::uint32_t>(registrations_.size()));
    for (const auto &[id, registration] : registrations_) {
        void *packed = nullptr;
        std::size_t nbytes = 0;
        require(ucp_rkey_pack(worker_.context(), registration.handle, &packed, &nbytes), "UCX has no remote key");
        out.number(registration.region.address);
        out.number(registration.region.nbytes);
        out.bytes({static_cast<const std::uint8_t *>(packed), nbytes});
        ucp_rkey_buffer_release(packed);
    }
}

std::vector<RemoteRegion> read_regions(ByteReader &in) {
    std::vector<RemoteRegion> regions(in.count(2 * sizeof(std::uint64_t)));
    for (RemoteRegion &region : regions) {
        region.address = in.number<std::uint64_t>();
        region.nbytes = in.number<std::uint64_t>();
        const auto packed = in.bytes();
        region.packed_key.assign(packed.begin(), packed.end());
    }
    return regions;
}

}  // namespace kvferry::ucx
