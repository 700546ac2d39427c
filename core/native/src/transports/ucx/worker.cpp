#include "worker.hpp"

#include <cstdlib>

#include "status.hpp"

namespace kvferry::ucx {

namespace {

using Config = std::unique_ptr<ucp_config_t, decltype(&ucp_config_release)>;

Config configure(const OptionMap &options) {
    ucp_config_t *raw = nullptr;
    require(ucp_config_read(nullptr, nullptr, &raw), "UCX cannot read its configuration");
    Config config(raw, ucp_config_release);
    // Endpoints that notice a peer's death are denied CMA, the fast way within a host, unless its memory domain says it
    // can revoke keys. That is asked for writes still in flight at a failure; a CMA write is over when it returns.
    // A UCX without that setting takes its next best way.
    if (std::getenv("UCX_CMA_MEMORY_INVALIDATE") == nullptr) ucp_config_modify(raw, "CMA_MEMORY_INVALIDATE", "y");
    for (const auto &[key, value] : options) {
        require(ucp_config_modify(raw, key.c_str(), value.c_str()), "UCX has no setting UCX_" + key + "=" + value);
    }
    return config;
}

}  // namespace

Worker::Worker(const OptionMap &options) {
    const Config config = configure(options);
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
    params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
    params.name = "kvferry";
    ucp_context_h context = nullptr;
    require(ucp_init(&params, config.get(), &context), "UCX does not start; does UCX_TLS leave it a transport?");
    context_.reset(context);

    ucp_worker_params_t worker_params{};
    worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
    ucp_worker_h worker = nullptr;
    require(ucp_worker_create(context, &worker_params, &worker), "UCX cannot make a worker");
    worker_.reset(worker);
    require(ucp_worker_get_efd(worker, &wakeup_fd_), "UCX has no descriptor to sleep on");
}

std::vector<std::uint8_t> Worker::address() const {
    ucp_address_t *raw = nullptr;
    std::size_t nbytes = 0;
    require(ucp_worker_get_address(get(), &raw, &nbytes), "UCX has no address");
    const auto *bytes = reinterpret_cast<const std::uint8_t *>(raw);
    std::vector<std::uint8_t> address(bytes, bytes + nbytes);
    ucp_worker_release_address(get(), raw);
    return address;
}

}  // namespace kvferry::ucx
