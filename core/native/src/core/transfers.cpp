#include "transfers.hpp"

namespace kvferry {

namespace {

template <typename Queue>
void drop(Queue &queue, const std::shared_ptr<Transfer> &transfer) {
    queue.erase(std::remove(queue.begin(), queue.end(), transfer), queue.end());
}

// As many segments from `first` on as fit; at least one.
Range cut(std::span<const Segment> segments, std::size_t first, std::size_t count, std::uint64_t nbytes) {
    Range range{first, first, 0};
    while (range.last < segments.size() && range.last - range.first < count) {
        const std::uint64_t more = segments[range.last].nbytes;
        if (range.last > range.first && range.nbytes + more > nbytes) break;
        range.nbytes += more;
        ++range.last;
    }
    return range;
}

}  // namespace

// --- the caller -------------------------------------------------------------------------------------------------

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

bool TransferBook::stop_all(const std::function<bool(const Transfer &)> &reads, const std::string &reason,
                            std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    std::vector<std::shared_ptr<Transfer>> stopped;
    for (const auto &[id, transfer] : live_) {
        if (reads(*transfer)) stopped.push_back(transfer);
    }
    for (const auto &transfer : stopped) stop_locked(transfer, reason);
    return over_.wait_for(lock, patience, [&] {
        return std::none_of(stopped.begin(), stopped.end(), [&](const auto &each) { return live_.contains(each->id); });
    });
}

std::optional<std::uint64_t> TransferBook::bytes_done(TransferId id) const {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(id);
    if (found == live_.end()) return std::nullopt;
    return found->second->done;
}

std::vector<Completion> TransferBook::collect() {
    const std::lock_guard lock(mutex_);
    // Both under the lock, so that a descriptor that is readable always has something behind it.
    ended_.clear();
    return std::exchange(completions_, {});
}

// --- the lanes --------------------------------------------------------------------------------------------------

std::shared_ptr<Transfer> TransferBook::take_unplanned() {
    const std::lock_guard lock(mutex_);
    if (unplanned_.empty()) return nullptr;
    auto transfer = std::move(unplanned_.front());
    unplanned_.pop_front();
    return transfer;
}

void TransferBook::planned(const std::shared_ptr<Transfer> &transfer, Plan plan) {
    const std::lock_guard lock(mutex_);
    transfer->segments = std::move(plan.segments);
    transfer->next_post = transfer->copies = plan.copies;
    transfer->copied_bytes = plan.copied_bytes;
    transfer->scatters = plan.scatters;
    transfer->planned = true;
    // Stopped meanwhile: it is over already.
    if (transfer->stopped()) return;
    if (transfer->all_taken()) {
        end_if_over_locked(transfer);
        return;
    }
    ready_.push_back(transfer);
    if (transfer->copied_bytes > limits_.copied_bytes()) copies_.notify_all();
}

std::optional<Piece> TransferBook::take(std::size_t lane) {
    const std::lock_guard lock(mutex_);
    const auto has_room = [&](const Transfer &each) { return each.peer->in_flight[lane] < limits_.in_flight; };
    auto transfer = next_locked([&](const Transfer &each) {
        return each.may_copy() || (each.may_post() && has_room(each));
    });
    if (transfer == nullptr) return std::nullopt;
    const bool posts = transfer->may_post() && has_room(*transfer);
    if (posts) ++transfer->peer->in_flight[lane];
    return cut_locked(std::move(transfer), !posts);
}

// Takes it out of the queue.
std::shared_ptr<Transfer> TransferBook::next_locked(const std::function<bool(const Transfer &)> &wanted) {
    const auto found = std::find_if(ready_.begin(), ready_.end(), [&](const auto &each) { return wanted(*each); });
    if (found == ready_.end()) return nullptr;
    auto transfer = std::move(*found);
    ready_.erase(found);
    return transfer;
}

bool TransferBook::is_stopped(const Transfer &transfer) const {
    const std::lock_guard lock(mutex_);
    return transfer.stopped();
}

Piece TransferBook::cut_locked(std::shared_ptr<Transfer> transfer, bool is_copy) {
    Range range;
    const std::vector<Segment> &segments = transfer->segments;
    if (is_copy) {
        range = cut({segments.data(), transfer->copies}, transfer->next_copy, limits_.segments, limits_.copied_bytes());
        transfer->next_copy = range.last;
    } else if (!transfer->returned.empty()) {
        range = transfer->returned.back();
        transfer->returned.pop_back();
    } else {
        range = transfer->scatters
                    ? cut(segments, transfer->next_post, limits_.scattered_segments(), limits_.scattered_bytes())
                    : cut(segments, transfer->next_post, limits_.segments, limits_.nbytes);
        transfer->next_post = range.last;
    }
    ++transfer->in_flight;
    if (!transfer->all_taken()) ready_.push_back(transfer);
    return Piece{std::move(transfer), range, is_copy};
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

void TransferBook::finish(const Piece &piece, std::size_t lane, const std::string &error) {
    const std::lock_guard lock(mutex_);
    if (!piece.is_copy) --piece.transfer->peer->in_flight[lane];
    settle_locked(piece, error);
}

void TransferBook::settle_locked(const Piece &piece, const std::string &error) {
    const auto &transfer = piece.transfer;
    --transfer->in_flight;
    if (error.empty()) {
        transfer->done += piece.range.nbytes;
        end_if_over_locked(transfer);
    } else {
        stop_locked(transfer, error);
    }
}

void TransferBook::fail(const std::shared_ptr<Transfer> &transfer, const std::string &error) {
    const std::lock_guard lock(mutex_);
    stop_locked(transfer, error);
}

bool TransferBook::has_work() const {
    const std::lock_guard lock(mutex_);
    return !unplanned_.empty() || !ready_.empty();
}

// --- the copiers ------------------------------------------------------------------------------------------------

std::optional<Piece> TransferBook::take_copy() {
    std::unique_lock lock(mutex_);
    while (!shut_) {
        if (auto transfer = next_locked(&Transfer::may_copy)) return cut_locked(std::move(transfer), true);
        copies_.wait(lock);
    }
    return std::nullopt;
}

void TransferBook::finish_copy(const Piece &piece, const std::string &error) {
    const std::lock_guard lock(mutex_);
    settle_locked(piece, error);
}

void TransferBook::shut() {
    const std::lock_guard lock(mutex_);
    shut_ = true;
    copies_.notify_all();
}

// --- ends -------------------------------------------------------------------------------------------------------

void TransferBook::stop_locked(const std::shared_ptr<Transfer> &transfer, const std::string &reason) {
    if (!transfer->stopped()) transfer->error = reason;
    drop(unplanned_, transfer);
    drop(ready_, transfer);
    end_if_over_locked(transfer);
}

void TransferBook::end_if_over_locked(const std::shared_ptr<Transfer> &transfer) {
    if (!transfer->over() || live_.erase(transfer->id) == 0) return;
    completions_.push_back({transfer->id, !transfer->stopped(), transfer->error, transfer->done});
    ended_.signal();
    over_.notify_all();
}

}  // namespace kvferry
