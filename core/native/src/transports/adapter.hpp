// From a C++ class to the C table: exceptions become a status and a message, and ownership a plain pointer.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <span>
#include <string>

#include "../core/error.hpp"
#include "kvferry/transport.h"

namespace kvferry {

using OptionMap = std::map<std::string, std::string>;

inline void copy_text(kvferry_error &error, const std::string &text) {
    const std::size_t length = std::min(text.size(), sizeof error.text - 1);
    std::memcpy(error.text, text.data(), length);
    error.text[length] = '\0';
}

template <typename Action>
kvferry_status guarded(kvferry_error *error, Action action) noexcept {
    try {
        return action();
    } catch (const Error &failure) {
        if (error != nullptr) copy_text(*error, failure.what());
        return failure.status();
    } catch (const std::bad_alloc &) {
        return KVFERRY_NO_MEMORY;
    } catch (const std::exception &failure) {
        if (error != nullptr) copy_text(*error, failure.what());
        return KVFERRY_INTERNAL;
    }
}

inline void reject_unknown(const OptionMap &options, std::initializer_list<const char *> known) {
    for (const auto &[key, value] : options) {
        if (std::find(known.begin(), known.end(), key) == known.end()) {
            std::string names;
            for (const char *name : known) names += (names.empty() ? "" : ", ") + std::string(name);
            throw Error(KVFERRY_INVALID, "there is no option " + key + "; there are: " + names);
        }
    }
}

// `Agent(OptionMap)` and the methods named below; `post` and `arm` return a status, the others raise.
template <typename Agent>
struct Adapter {
    static Agent &self(kvferry_agent *agent) { return *reinterpret_cast<Agent *>(agent); }

    static kvferry_status create(const kvferry_option *options, size_t count, kvferry_agent **agent,
                                 kvferry_error *error) {
        return guarded(error, [&] {
            OptionMap map;
            for (const auto &option : std::span(options, count)) map[option.key] = option.value;
            *agent = reinterpret_cast<kvferry_agent *>(std::make_unique<Agent>(map).release());
            return KVFERRY_OK;
        });
    }

    static void close(kvferry_agent *agent) { std::unique_ptr<Agent>{&self(agent)}.reset(); }

    static kvferry_status register_memory(kvferry_agent *agent, const kvferry_region *region, uint64_t *registration,
                                          kvferry_error *error) {
        return guarded(error, [&] {
            *registration = self(agent).register_memory(*region);
            return KVFERRY_OK;
        });
    }

    static kvferry_status deregister_memory(kvferry_agent *agent, uint64_t registration, kvferry_error *error) {
        return guarded(error, [&] {
            self(agent).deregister_memory(registration);
            return KVFERRY_OK;
        });
    }

    static kvferry_status describe(kvferry_agent *agent, uint8_t *buffer, size_t capacity, size_t *nbytes,
                                   kvferry_error *error) {
        return guarded(error, [&] { return give(self(agent).describe(), buffer, capacity, nbytes); });
    }

    static kvferry_status connect(kvferry_agent *agent, const uint8_t *descriptor, size_t nbytes, uint64_t *peer,
                                  kvferry_error *error) {
        return guarded(error, [&] {
            *peer = self(agent).connect(std::span(descriptor, nbytes));
            return KVFERRY_OK;
        });
    }

    static void disconnect(kvferry_agent *agent, uint64_t peer, int dead) {
        guarded(nullptr, [&] {
            self(agent).disconnect(peer, dead != 0);
            return KVFERRY_OK;
        });
    }

    static kvferry_status post(kvferry_agent *agent, uint64_t peer, uint64_t post, const kvferry_segment *segments,
                               size_t count, kvferry_error *error) {
        return guarded(error, [&] { return self(agent).post(peer, post, std::span(segments, count)); });
    }

    static size_t progress(kvferry_agent *agent, kvferry_completion *completions, size_t capacity) {
        size_t count = 0;
        guarded(nullptr, [&] {
            count = self(agent).progress(std::span(completions, capacity));
            return KVFERRY_OK;
        });
        return count;
    }

    static int wakeup_fd(kvferry_agent *agent) { return self(agent).wakeup_fd(); }
    static kvferry_status arm(kvferry_agent *agent) {
        return guarded(nullptr, [&] { return self(agent).arm(); });
    }

    static kvferry_status notify(kvferry_agent *agent, uint64_t peer, const uint8_t *message, size_t nbytes,
                                 kvferry_error *error) {
        return guarded(error, [&] {
            self(agent).notify(peer, std::span(message, nbytes));
            return KVFERRY_OK;
        });
    }

    static kvferry_status take_notice(kvferry_agent *agent, uint8_t *buffer, size_t capacity, size_t *nbytes) {
        return guarded(nullptr, [&] {
            auto &notices = self(agent).notices();
            if (notices.empty()) return KVFERRY_AGAIN;
            const kvferry_status status = give(notices.front(), buffer, capacity, nbytes);
            if (status == KVFERRY_OK) notices.pop_front();
            return status;
        });
    }

    static kvferry_status give(std::span<const std::uint8_t> bytes, uint8_t *buffer, size_t capacity, size_t *nbytes) {
        *nbytes = bytes.size();
        if (bytes.size() > capacity) return KVFERRY_NO_MEMORY;
        std::copy(bytes.begin(), bytes.end(), buffer);
        return KVFERRY_OK;
    }

    static constexpr kvferry_transport table(const char *name, const char *(*library)()) {
        kvferry_transport table{KVFERRY_TRANSPORT_ABI, sizeof(kvferry_transport), name, library, create, close,
                                register_memory, deregister_memory, describe, connect, disconnect, post, progress,
                                wakeup_fd, arm, nullptr, nullptr};
        if constexpr (requires(Agent agent) { agent.notices(); }) {
            table.notify = notify;
            table.take_notice = take_notice;
        }
        return table;
    }
};

}  // namespace kvferry
