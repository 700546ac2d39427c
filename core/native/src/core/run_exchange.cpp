#include "run_exchange.hpp"

#include <algorithm>

namespace kvferry {

namespace {

using namespace std::chrono_literals;

// A target that has not answered is told again: to learn whether it can be reached, and it places nothing twice.
constexpr auto kAskAgain = 1s;

}  // namespace

RunExchange::RunExchange(TransportAgent &agent, const EngineKey &self, std::uint64_t landing_bytes,
                         std::function<void(const Piece &, const std::string &)> finish)
    : agent_(agent), self_(self), finish_(std::move(finish)) {
    if (landing_bytes > 0 && agent.carries_notices()) landing_ = std::make_unique<Landing>(agent, landing_bytes);
}

// --- the target -------------------------------------------------------------------------------------------------

void RunExchange::remember(const std::vector<Region> &regions) {
    for (const Region &region : regions) {
        if (region.device_kind == KVFERRY_CPU) memory_.add(region);
    }
}

void RunExchange::forget(const std::vector<Region> &regions) {
    for (const Region &region : regions) memory_.remove(region);
}

void RunExchange::meet(const EngineKey &writer, std::uint64_t handle) {
    if (landing_ == nullptr) return;
    auto grant = landing_->grant(writer);
    if (!grant) return;
    grant->key = self_;
    try {
        tell(handle, *grant);
        writers_[writer] = handle;
    } catch (const Error &) {
        // It never hears of its slots, and writes as it would without them.
        landing_->end(writer, true);
    }
}

void RunExchange::part(const EngineKey &writer, bool fenced) {
    const auto found = writers_.find(writer);
    if (found == writers_.end()) return;
    landing_->end(writer, fenced);
    try {
        if (!fenced) tell(found->second, Revoked{self_});
    } catch (const Error &) {
        // It cannot be reached, and finds that out by itself.
    }
    writers_.erase(found);
}

void RunExchange::part_all() {
    while (!writers_.empty()) part(EngineKey(writers_.begin()->first), false);
}

void RunExchange::hear(const Landed &landed) {
    const auto writer = writers_.find(landed.key);
    if (writer == writers_.end()) return;
    const std::string error = landing_->place(landed, memory_);
    placed_ += error.empty();
    try {
        tell(writer->second, Placed{self_, landed.post, error});
    } catch (const Error &) {
        // It asks again.
    }
}

// --- the writer -------------------------------------------------------------------------------------------------

void RunExchange::announce(std::uint64_t post, const PackedRun &run) {
    const Peer &peer = *run.piece.transfer->peer;
    if (!has_slots_of(peer)) {
        end(run, "the peer takes no more writes");
        return;
    }
    Waiting waiting{run, {}};
    if (tell_of(post, waiting)) landed_.emplace(post, std::move(waiting));
}

bool RunExchange::tell_of(std::uint64_t post, Waiting &waiting) {
    waiting.told = Clock::now();
    try {
        tell(waiting.run.handle, Landed{self_, post, waiting.run.slot, waiting.run.nbytes});
    } catch (const Error &error) {
        // A process of this host is there until it is proven gone, and may have heard of it before.
        if (waiting.run.piece.transfer->peer->process.get() >= 0) return true;
        end(waiting.run, error.what());
        return false;
    }
    return true;
}

void RunExchange::repeat() {
    if (landed_.empty()) return;
    const auto now = Clock::now();
    for (auto each = landed_.begin(); each != landed_.end();) {
        const bool over = now - each->second.told > kAskAgain && !tell_of(each->first, each->second);
        each = over ? landed_.erase(each) : std::next(each);
    }
}

void RunExchange::hear(const Placed &placed) {
    const auto found = landed_.find(placed.post);
    if (found == landed_.end() || found->second.run.piece.transfer->peer->key != placed.key) return;
    const PackedRun run = std::move(found->second.run);
    landed_.erase(found);
    end(run, placed.error);
}

void RunExchange::hear(const Revoked &revoked) {
    grants_.drop(revoked.key);
    std::erase_if(landed_, [&](const auto &entry) {
        const bool theirs = entry.second.run.piece.transfer->peer->key == revoked.key;
        if (theirs) end(entry.second.run, "the peer takes no more writes");
        return theirs;
    });
}

bool RunExchange::waits_for(std::uint64_t handle) const {
    return std::any_of(landed_.begin(), landed_.end(),
                       [&](const auto &entry) { return entry.second.run.handle == handle; });
}

void RunExchange::drop_dead() {
    std::erase_if(landed_, [&](const auto &entry) {
        const bool dead = entry.second.run.piece.transfer->peer->process.readable();
        if (dead) end(entry.second.run, kProcessEnded);
        return dead;
    });
}

void RunExchange::end(const PackedRun &run, const std::string &error) {
    release(*run.piece.transfer->peer, run.slot);
    finish_(run.piece, error);
}

// --- both -------------------------------------------------------------------------------------------------------

bool RunExchange::advance() {
    bool heard = false;
    while (const auto body = agent_.take_notice()) {
        heard = true;
        try {
            std::visit([this](const auto &notice) { hear(notice); }, decode_notice(*body));
        } catch (const Error &) {
            // Not of ours.
        }
    }
    repeat();
    return heard;
}

}  // namespace kvferry
