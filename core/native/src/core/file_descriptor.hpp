// Owned file descriptors, and the eventfd that wakes a thread.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "error.hpp"

namespace kvferry {

class FileDescriptor {
public:
    FileDescriptor() = default;
    explicit FileDescriptor(int fd) : fd_(fd) {}
    FileDescriptor(FileDescriptor &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    FileDescriptor &operator=(FileDescriptor &&other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~FileDescriptor() {
        if (fd_ >= 0) ::close(fd_);
    }

    int get() const noexcept { return fd_; }

    // Whether it can be read now. A pidfd turns readable when its process has ended.
    bool readable() const noexcept {
        if (fd_ < 0) return false;
        pollfd entry{fd_, POLLIN, 0};
        return ::poll(&entry, 1, 0) > 0;
    }

private:
    int fd_ = -1;
};

class EventFd {
public:
    EventFd() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
        if (fd_.get() < 0) throw Error(KVFERRY_INTERNAL, std::string("no eventfd: ") + std::strerror(errno));
    }

    int get() const noexcept { return fd_.get(); }

    void signal() const noexcept {
        const std::uint64_t one = 1;
        // It fails only when the counter is full: then it is readable already.
        [[maybe_unused]] auto written = ::write(fd_.get(), &one, sizeof one);
    }

    void clear() const noexcept {
        std::uint64_t count = 0;
        [[maybe_unused]] auto got = ::read(fd_.get(), &count, sizeof count);
    }

private:
    FileDescriptor fd_;
};

}  // namespace kvferry
