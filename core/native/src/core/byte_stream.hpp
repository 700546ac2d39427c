// Little-endian bytes in and out; the reader trusts nothing that it reads. Also for transports' own descriptors.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "error.hpp"

namespace kvferry {

static_assert(std::endian::native == std::endian::little);

class ByteWriter {
public:
    template <typename Number>
    void number(Number value) {
        const auto *raw = reinterpret_cast<const std::uint8_t *>(&value);
        bytes_.insert(bytes_.end(), raw, raw + sizeof value);
    }

    void bytes(std::span<const std::uint8_t> value) {
        number(static_cast<std::uint32_t>(value.size()));
        bytes_.insert(bytes_.end(), value.begin(), value.end());
    }

    void text(const std::string &value) { bytes({reinterpret_cast<const std::uint8_t *>(value.data()), value.size()}); }

    std::vector<std::uint8_t> take() { return std::move(bytes_); }

private:
    std::vector<std::uint8_t> bytes_;
};

class ByteReader {
public:
    explicit ByteReader(std::span<const std::uint8_t> bytes) : left_(bytes) {}

    template <typename Number>
    Number number() {
        Number value;
        std::memcpy(&value, take(sizeof value).data(), sizeof value);
        return value;
    }

    std::span<const std::uint8_t> bytes() { return take(number<std::uint32_t>()); }

    std::string text() {
        auto raw = bytes();
        return {reinterpret_cast<const char *>(raw.data()), raw.size()};
    }

    // A count of things of which each takes at least `each` bytes: never more than the bytes that are left can hold.
    std::uint32_t count(std::size_t each) {
        const auto value = number<std::uint32_t>();
        if (value > left_.size() / each) truncated();
        return value;
    }

    void end() const {
        if (!left_.empty()) throw Error(KVFERRY_INVALID, std::to_string(left_.size()) + " bytes follow the descriptor");
    }

private:
    std::span<const std::uint8_t> take(std::size_t nbytes) {
        if (nbytes > left_.size()) truncated();
        auto taken = left_.first(nbytes);
        left_ = left_.subspan(nbytes);
        return taken;
    }

    [[noreturn]] static void truncated() { throw Error(KVFERRY_INVALID, "the descriptor is cut short or damaged"); }

    std::span<const std::uint8_t> left_;
};

}  // namespace kvferry
