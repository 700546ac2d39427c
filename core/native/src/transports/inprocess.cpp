// A transport whose peers live in the same process: memcpy, with delays and failures on request. For tests, under
// ThreadSanitizer above all: an agent's thread writes to memory that another agent's thread owns.
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "../core/byte_stream.hpp"
#include "../core/file_descriptor.hpp"
#include "adapter.hpp"

namespace kvferry {
namespace {

using Clock = std::chrono::steady_clock;

// What other agents' threads may touch of an agent. Writers hold it shared while they copy; its owner takes it whole
// before its memory may go.
struct Mailbox {
    std::shared_mutex open_mutex;
    bool open = true;
    std::mutex notices_mutex;
    std::deque<std::vector<std::uint8_t>> arrived;
    EventFd wakeup;
};

class Directory {
public:
    std::uint64_t enter(std::shared_ptr<Mailbox> mailbox) {
        const std::lock_guard lock(mutex_);
        mailboxes_.emplace(++last_, std::move(mailbox));
        return last_;
    }

    void leave(std::uint64_t key) {
        const std::lock_guard lock(mutex_);
        mailboxes_.erase(key);
    }

    std::shared_ptr<Mailbox> find(std::uint64_t key) const {
        const std::lock_guard lock(mutex_);
        const auto found = mailboxes_.find(key);
        if (found == mailboxes_.end()) throw Error(KVFERRY_UNREACHABLE, "no agent of this process has that descriptor");
        return found->second;
    }

private:
    mutable std::mutex mutex_;
    std::uint64_t last_ = 0;
    std::unordered_map<std::uint64_t, std::shared_ptr<Mailbox>> mailboxes_;
};

Directory &directory() {
    static Directory all;
    return all;
}

std::uint64_t number(const OptionMap &options, const char *key) {
    const auto found = options.find(key);
    return found == options.end() ? 0 : std::stoull(found->second);
}

struct Post {
    std::uint64_t id;
    std::uint64_t peer;
    std::vector<kvferry_segment> segments;
    Clock::time_point due;
};

class InprocessAgent {
public:
    explicit InprocessAgent(const OptionMap &options)
        : mailbox_(std::make_shared<Mailbox>()),
          delay_(number(options, "delay_us")),
          fail_every_(number(options, "fail_every")),
          again_every_(number(options, "again_every")),
          refuse_registration_(number(options, "refuse_registration")),
          refuse_lists_(number(options, "refuse_lists")) {
        reject_unknown(options, {"delay_us", "fail_every", "again_every", "refuse_registration", "refuse_lists"});
        key_ = directory().enter(mailbox_);
    }

    ~InprocessAgent() {
        directory().leave(key_);
        const std::unique_lock lock(mailbox_->open_mutex);
        mailbox_->open = false;
    }

    std::uint64_t register_memory(const kvferry_region &) {
        if (refuse_registration_ != 0) throw Error(KVFERRY_NO_MEMORY, "asked to refuse registration");
        return ++last_;
    }
    void deregister_memory(std::uint64_t) {
        // Whoever still copies to us ends first.
        const std::unique_lock lock(mailbox_->open_mutex);
    }

    std::vector<std::uint8_t> describe() const {
        ByteWriter out;
        out.number(key_);
        return out.take();
    }

    std::uint64_t connect(std::span<const std::uint8_t> descriptor) {
        ByteReader in(descriptor);
        auto mailbox = directory().find(in.number<std::uint64_t>());
        in.end();
        peers_.emplace(++last_, std::move(mailbox));
        return last_;
    }

    void disconnect(std::uint64_t peer, bool) { peers_.erase(peer); }

    kvferry_status post(std::uint64_t peer, std::uint64_t post, std::span<const kvferry_segment> segments) {
        if (!peers_.contains(peer)) throw Error(KVFERRY_INVALID, "no such peer");
        if (refuse_lists_ != 0 && segments.size() > 1) throw Error(KVFERRY_INVALID, "asked to refuse lists");
        if (again_every_ != 0 && ++asked_ % again_every_ == 0) return KVFERRY_AGAIN;
        posts_.push_back({post, peer, {segments.begin(), segments.end()}, Clock::now() + delay_});
        return KVFERRY_OK;
    }

    std::size_t progress(std::span<kvferry_completion> completions) {
        mailbox_->wakeup.clear();
        take_arrived();
        std::size_t count = 0;
        while (count < completions.size() && !posts_.empty() && posts_.front().due <= Clock::now()) {
            const Post post = std::move(posts_.front());
            posts_.pop_front();
            completions[count].post = post.id;
            completions[count].status = guarded(&completions[count].error, [&] { return copy(post); });
            ++count;
        }
        return count;
    }

    int wakeup_fd() const { return mailbox_->wakeup.get(); }
    kvferry_status arm() const { return posts_.empty() ? KVFERRY_OK : KVFERRY_AGAIN; }

    void notify(std::uint64_t peer, std::span<const std::uint8_t> message) {
        if (!peers_.contains(peer)) throw Error(KVFERRY_INVALID, "no such peer");
        const auto &target = peers_.at(peer);
        const std::shared_lock open(target->open_mutex);
        if (!target->open) throw Error(KVFERRY_UNREACHABLE, "the peer is closed");
        const std::lock_guard lock(target->notices_mutex);
        target->arrived.emplace_back(message.begin(), message.end());
        target->wakeup.signal();
    }

    std::deque<std::vector<std::uint8_t>> &notices() { return notices_; }

private:
    kvferry_status copy(const Post &post) {
        const auto found = peers_.find(post.peer);
        if (found == peers_.end()) throw Error(KVFERRY_CANCELLED, "disconnected");
        if (fail_every_ != 0 && ++copied_ % fail_every_ == 0) throw Error(KVFERRY_UNREACHABLE, "asked to fail");
        const std::shared_lock lock(found->second->open_mutex);
        if (!found->second->open) throw Error(KVFERRY_UNREACHABLE, "the peer is closed");
        for (const auto &segment : post.segments) {
            std::memcpy(reinterpret_cast<void *>(segment.dst), reinterpret_cast<const void *>(segment.src),
                        segment.nbytes);
        }
        return KVFERRY_OK;
    }

    void take_arrived() {
        const std::lock_guard lock(mailbox_->notices_mutex);
        for (auto &notice : mailbox_->arrived) notices_.push_back(std::move(notice));
        mailbox_->arrived.clear();
    }

    const std::shared_ptr<Mailbox> mailbox_;
    const std::chrono::microseconds delay_;
    const std::uint64_t fail_every_;
    const std::uint64_t again_every_;
    const std::uint64_t refuse_registration_;
    const std::uint64_t refuse_lists_;
    std::uint64_t key_ = 0;
    std::uint64_t last_ = 0;
    std::uint64_t asked_ = 0;
    std::uint64_t copied_ = 0;
    std::unordered_map<std::uint64_t, std::shared_ptr<Mailbox>> peers_;
    std::deque<Post> posts_;
    std::deque<std::vector<std::uint8_t>> notices_;
};

}  // namespace
}  // namespace kvferry

extern "C" __attribute__((visibility("default"))) const kvferry_transport *kvferry_transport_v1(void) {
    static const kvferry_transport table = kvferry::Adapter<kvferry::InprocessAgent>::table(
        "inprocess", [] { return "inprocess 1"; });
    return &table;
}
