// Errors of the core: a status of the C ABI and a message.
#pragma once

#include <stdexcept>
#include <string>

#include "kvferry/transport.h"

namespace kvferry {

class Error : public std::runtime_error {
public:
    Error(kvferry_status status, const std::string &message) : std::runtime_error(message), status_(status) {}

    kvferry_status status() const noexcept { return status_; }

private:
    kvferry_status status_;
};

}  // namespace kvferry
