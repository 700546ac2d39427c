#include "endpoint.hpp"

#include "status.hpp"

namespace kvferry::ucx {

Endpoint::Endpoint(const Worker &worker, std::span<const std::uint8_t> address,
                   const std::vector<RemoteRegion> &regions)
    : worker_(worker) {
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                        UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_USER_DATA;
    params.address = reinterpret_cast<const ucp_address_t *>(address.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = [](void *self, ucp_ep_h, ucs_status_t) { static_cast<Endpoint *>(self)->broken_ = true; };
    params.err_handler.arg = nullptr;
    params.user_data = this;
    require(ucp_ep_create(worker.get(), &params, &endpoint_), "UCX cannot reach the peer");
    try {
        unpack(regions);
    } catch (...) {
        close();
        throw;
    }
}

Endpoint::~Endpoint() { close(); }

void Endpoint::unpack(const std::vector<RemoteRegion> &regions) {
    for (const RemoteRegion &region : regions) {
        ucp_rkey_h key = nullptr;
        require(ucp_ep_rkey_unpack(endpoint_, region.packed_key.data(), &key), "UCX cannot read the peer's key");
        keys_.push_back({region.address, region.nbytes, key});
    }
}

void Endpoint::close() {
    for (const Key &key : keys_) ucp_rkey_destroy(key.handle);
    keys_.clear();
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK;
    params.flags = UCP_EP_CLOSE_FLAG_FORCE;
    params.cb.send = [](void *request, ucs_status_t, void *) { ucp_request_free(request); };
    // It ends by progress, and by the worker's end at the latest.
    ucp_ep_close_nbx(endpoint_, &params);
}

ucp_rkey_h Endpoint::key(std::uint64_t address, std::uint64_t nbytes) const {
    for (const Key &key : keys_) {
        const std::uint64_t offset = address - key.address;
        if (offset <= key.nbytes && nbytes <= key.nbytes - offset) return key.handle;
    }
    throw Error(KVFERRY_INVALID, "the peer has no key for that memory");
}

}  // namespace kvferry::ucx
