#include "transfers.hpp"

#include <algorithm>

namespace kvferry {

namespace {

constexpr std::size_t kNoticesKept = 1024;

template <typename Queue>
void drop(Queue &queue, const std::shared_ptr<Transfer> &transfer) {
    queue.erase(std::remove(queue.begin(), queue.end(), transfer), queue.end());
}

}  // namespace

void TransferBook::submit(std::shared_ptr<Transfer> transfer) {
    const std::lock_guard lock(mutex_);
    if (transfer->peer->left) throw Error(KVFERRY_UNREACHABLE, "the peer is gone");
    live_.emplace(transfer->id, transfer);
    unplanned_.push_back(std::move(transfer));
}

bool TransferBook::stop(TransferId id, const std::string &reason) {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(id);
    if (found == live_.end()) return false;
    stop_locked(std::shared_ptr(found->second), reason);
    return true;
}

void TransferBook::leave(const std::shared_ptr<Peer> &peer, const std::string &reason) {
    const std::lock_guard lock(mutex_);
    peer->left = true;
    std::vector<std::shared_ptr<Transfer>> theirs;
    for (const auto &[id, transfer] : live_) {
        if (transfer->peer == peer) theirs.push_back(transfer);
    }
    for (const auto &transfer : theirs) stop_locked(transfer, reason);
}

std::optional<std::uint64_t> TransferBook::bytes_done(TransferId id) const {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(id);
    if (found == live_.end()) return std::nullopt;
    return found->second->done;
}

std::vector<Completion> TransferBook::collect() {
    const std::lock_guard lock(mutex_);
    // Both under the lock, so that a descriptor that is readable always has something behind it. Whoever wants no
    // notices must not be kept awake by a peer that sends them.
    ended_.clear();
    return std::exchange(completions_, {});
}

void TransferBook::put_notice(Bytes notice) {
    const std::lock_guard lock(mutex_);
    notices_.push_back(std::move(notice));
    if (notices_.size() > kNoticesKept) notices_.pop_front();
    ended_.signal();
}

std::vector<Bytes> TransferBook::collect_notices() {
    const std::lock_guard lock(mutex_);
    if (completions_.empty()) ended_.clear();
    std::vector<Bytes> taken(std::make_move_iterator(notices_.begin()), std::make_move_iterator(notices_.end()));
    notices_.clear();
    return taken;
}

std::shared_ptr<Transfer> TransferBook::take_unplanned() {
    const std::lock_guard lock(mutex_);
    if (unplanned_.empty()) return nullptr;
    auto transfer = std::move(unplanned_.front());
    unplanned_.pop_front();
    return transfer;
}

std::shared_ptr<Transfer> TransferBook::planned(const std::shared_ptr<Transfer> &transfer,
                                                std::vector<Segment> segments) {
    const std::lock_guard lock(mutex_);
    transfer->segments = std::move(segments);
    transfer->planned = true;
    if (transfer->over()) return transfer;
    ready_.push_back(transfer);
    return nullptr;
}

std::optional<Piece> TransferBook::take(std::size_t lane) {
    const std::lock_guard lock(mutex_);
    for (std::size_t left = ready_.size(); left > 0; --left) {
        std::shared_ptr<Transfer> transfer = std::move(ready_.front());
        ready_.pop_front();
        if (transfer->peer->in_flight[lane] >= limits_.in_flight) {
            ready_.push_back(std::move(transfer));
            continue;
        }
        const Range range = cut_locked(*transfer);
        ++transfer->in_flight;
        ++transfer->peer->in_flight[lane];
        if (!transfer->all_taken()) ready_.push_back(transfer);
        return Piece{std::move(transfer), range};
    }
    return std::nullopt;
}

Range TransferBook::cut_locked(Transfer &transfer) const {
    if (!transfer.returned.empty()) {
        const Range range = transfer.returned.back();
        transfer.returned.pop_back();
        return range;
    }
    const std::vector<Segment> &segments = transfer.segments;
    Range range{transfer.next, transfer.next, 0};
    while (range.last < segments.size() && range.last - range.first < limits_.segments) {
        const std::uint64_t more = segments[range.last].nbytes;
        if (range.last > range.first && range.nbytes + more > limits_.nbytes) break;
        range.nbytes += more;
        ++range.last;
    }
    transfer.next = range.last;
    return range;
}

void TransferBook::put_back(const Piece &piece, std::size_t lane) {
    const std::lock_guard lock(mutex_);
    const auto &transfer = piece.transfer;
    --transfer->in_flight;
    --transfer->peer->in_flight[lane];
    if (transfer->stopped()) {
        end_if_over_locked(transfer);
        return;
    }
    const bool waits = !transfer->all_taken();
    transfer->returned.push_back(piece.range);
    if (!waits) ready_.push_front(transfer);
}

std::shared_ptr<Transfer> TransferBook::finish(const Piece &piece, std::size_t lane, const std::string &error) {
    const std::lock_guard lock(mutex_);
    const auto &transfer = piece.transfer;
    --transfer->in_flight;
    --transfer->peer->in_flight[lane];
    if (error.empty()) {
        transfer->done += piece.range.nbytes;
    } else if (!transfer->stopped()) {
        transfer->error = error;
        drop(ready_, transfer);
    }
    return transfer->over() ? transfer : nullptr;
}

void TransferBook::fail(const std::shared_ptr<Transfer> &transfer, const std::string &error) {
    const std::lock_guard lock(mutex_);
    stop_locked(transfer, error);
}

void TransferBook::end(const std::shared_ptr<Transfer> &transfer) {
    const std::lock_guard lock(mutex_);
    end_locked(transfer);
}

bool TransferBook::is_stopped(const Transfer &transfer) const {
    const std::lock_guard lock(mutex_);
    return transfer.stopped();
}

bool TransferBook::has_work() const {
    const std::lock_guard lock(mutex_);
    return !unplanned_.empty() || !ready_.empty();
}

void TransferBook::stop_locked(const std::shared_ptr<Transfer> &transfer, const std::string &reason) {
    if (!transfer->stopped()) transfer->error = reason;
    drop(unplanned_, transfer);
    drop(ready_, transfer);
    end_if_over_locked(transfer);
}

void TransferBook::end_if_over_locked(const std::shared_ptr<Transfer> &transfer) {
    if (transfer->over()) end_locked(transfer);
}

void TransferBook::end_locked(const std::shared_ptr<Transfer> &transfer) {
    if (live_.erase(transfer->id) == 0) return;
    completions_.push_back({transfer->id, !transfer->stopped(), transfer->error, transfer->done});
    ended_.signal();
}

}  // namespace kvferry
