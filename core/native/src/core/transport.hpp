// A transport behind the C ABI, as C++: the loaded library, and one agent of it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "error.hpp"
#include "kvferry/transport.h"

namespace kvferry {

using Bytes = std::vector<std::uint8_t>;
using Options = std::map<std::string, std::string>;
using Region = kvferry_region;
using Segment = kvferry_segment;

// A transport's shared object. It stays loaded for the life of the process: transports leave threads, signal handlers
// and memory hooks behind that would jump into unmapped code.
class TransportLibrary {
public:
    // Raises KVFERRY_UNAVAILABLE if the file cannot be loaded, is no transport, or speaks another ABI.
    static TransportLibrary load(const std::string &path);
    // For transports that are linked in: tests.
    explicit TransportLibrary(const kvferry_transport *table);

    std::string name() const { return table_->name; }
    std::string version() const { return table_->library(); }
    const kvferry_transport &table() const { return *table_; }

private:
    const kvferry_transport *table_;
};

// One agent. All calls from one thread.
class TransportAgent {
public:
    TransportAgent(const TransportLibrary &library, const Options &options);

    std::uint64_t register_memory(const Region &region);
    void deregister_memory(std::uint64_t registration);
    Bytes describe();
    std::uint64_t connect(std::span<const std::uint8_t> descriptor);
    // `dead`: its process is gone.
    void disconnect(std::uint64_t peer, bool dead) { table_->disconnect(agent_.get(), peer, dead); }

    // False: not now. Raises if it was refused; then nothing was posted.
    bool post(std::uint64_t peer, std::uint64_t post, std::span<const Segment> segments);
    std::span<const kvferry_completion> progress();

    int wakeup_fd() { return table_->wakeup_fd(agent_.get()); }
    // Whether it is safe to sleep on the descriptor.
    bool arm() { return table_->arm(agent_.get()) == KVFERRY_OK; }

    bool carries_notices() const { return table_->notify != nullptr; }
    void notify(std::uint64_t peer, std::span<const std::uint8_t> message);
    std::optional<Bytes> take_notice();

private:
    struct Close {
        const kvferry_transport *table;
        void operator()(kvferry_agent *agent) const { table->close(agent); }
    };

    const kvferry_transport *table_;
    std::unique_ptr<kvferry_agent, Close> agent_;
    std::vector<kvferry_completion> completions_;
    Bytes notice_;
};

}  // namespace kvferry
