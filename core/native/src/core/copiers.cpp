#include "copiers.hpp"

#include <pthread.h>

#include <cstring>

namespace kvferry {

namespace {

// What belongs to a transfer that is at least so long goes past the caches; a few blocks stay there for whoever reads
// them next.
constexpr std::uint64_t kStreamed = 1u << 20;

void copy_cached(void *to, const void *from, std::size_t nbytes) { std::memcpy(to, from, nbytes); }

}  // namespace

std::string copy(const Piece &piece) {
    if (piece.transfer->peer->process.readable()) return kProcessEnded;
    const auto copier = piece.transfer->copied_bytes < kStreamed ? copy_cached : stream;
    for (const Segment &segment : piece.segments()) {
        copier(reinterpret_cast<void *>(segment.dst), reinterpret_cast<const void *>(segment.src), segment.nbytes);
    }
    return {};
}

Copiers::~Copiers() {
    book_.shut();
    for (std::thread &thread : threads_) thread.join();
}

void Copiers::start(std::size_t count) {
    while (threads_.size() < count) threads_.emplace_back([this] { run(); });
}

void Copiers::run() {
    ::pthread_setname_np(::pthread_self(), "kvferry-copy");
    while (const auto piece = book_.take_copy()) book_.finish_copy(*piece, copy(*piece));
}

}  // namespace kvferry
