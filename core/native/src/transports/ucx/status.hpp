// UCX's statuses as ours.
#pragma once

#include <ucp/api/ucp.h>

#include <string>

#include "../../core/error.hpp"

namespace kvferry::ucx {

inline kvferry_status translate(ucs_status_t status) {
    switch (status) {
        case UCS_OK:
            return KVFERRY_OK;
        case UCS_ERR_CANCELED:
            return KVFERRY_CANCELLED;
        case UCS_ERR_NO_MEMORY:
            return KVFERRY_NO_MEMORY;
        case UCS_ERR_NO_DEVICE:
        case UCS_ERR_UNSUPPORTED:
            return KVFERRY_UNAVAILABLE;
        case UCS_ERR_INVALID_PARAM:
        case UCS_ERR_INVALID_ADDR:
            return KVFERRY_INVALID;
        case UCS_ERR_UNREACHABLE:
        case UCS_ERR_CONNECTION_RESET:
        case UCS_ERR_NOT_CONNECTED:
        case UCS_ERR_ENDPOINT_TIMEOUT:
        case UCS_ERR_REJECTED:
            return KVFERRY_UNREACHABLE;
        default:
            return KVFERRY_INTERNAL;
    }
}

inline void require(ucs_status_t status, const std::string &what) {
    if (status != UCS_OK) throw Error(translate(status), what + ": " + ucs_status_string(status));
}

}  // namespace kvferry::ucx
