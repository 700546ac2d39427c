// A UCP context with one worker: configured, started, and ended in the right order.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../adapter.hpp"

namespace kvferry::ucx {

class Worker {
public:
    // Each option is a UCX variable without its prefix: {"TLS": "tcp,self"}.
    explicit Worker(const OptionMap &options);

    ucp_context_h context() const { return context_.get(); }
    ucp_worker_h get() const { return worker_.get(); }
    bool progress() const { return ucp_worker_progress(worker_.get()) != 0; }
    std::vector<std::uint8_t> address() const;
    int wakeup_fd() const { return wakeup_fd_; }
    // Whether it is safe to sleep.
    bool arm() const { return ucp_worker_arm(worker_.get()) == UCS_OK; }

private:
    template <auto destroy>
    struct Destroy {
        template <typename Handle>
        void operator()(Handle *handle) const {
            destroy(handle);
        }
    };

    std::unique_ptr<std::remove_pointer_t<ucp_context_h>, Destroy<ucp_cleanup>> context_;
    std::unique_ptr<std::remove_pointer_t<ucp_worker_h>, Destroy<ucp_worker_destroy>> worker_;
    int wakeup_fd_ = -1;
};

}  // namespace kvferry::ucx
