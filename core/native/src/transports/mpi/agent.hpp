// Writes over MPI, between the two processes of one world. A write is a message that names the places at the target,
// and one Send of all its pieces; the target's agent receives them where they belong, and answers when they are there.
//
// Send/Recv, not Put: with Open MPI's Put the target's process must ask as well, and it is slower. One Send of scattered
// memory, not one for each piece: a piece would cost a round trip, where fragments of the whole go through shared memory
// one after the other, with both processes copying.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "../../core/regions.hpp"
#include "../adapter.hpp"
#include "message.hpp"
#include "world.hpp"

namespace kvferry::mpi {

class MpiAgent {
public:
    explicit MpiAgent(const OptionMap &options);
    ~MpiAgent();

    std::uint64_t register_memory(const kvferry_region &region);
    void deregister_memory(std::uint64_t registration);
    std::vector<std::uint8_t> describe() const;
    std::uint64_t connect(std::span<const std::uint8_t> descriptor);
    void disconnect(std::uint64_t peer, bool dead);
    kvferry_status post(std::uint64_t peer, std::uint64_t post, std::span<const kvferry_segment> segments);
    std::size_t progress(std::span<kvferry_completion> completions);
    // MPI has none: a busy lane asks again and again, an idle one not at all.
    int wakeup_fd() const { return KVFERRY_POLLS_POLITELY; }
    kvferry_status arm() const { return KVFERRY_OK; }
    void notify(std::uint64_t peer, std::span<const std::uint8_t> message);
    std::deque<std::vector<std::uint8_t>> &notices() { return notices_; }

private:
    // A short message on its way, in either direction.
    struct Letter {
        std::vector<std::uint8_t> bytes;
        MPI_Request request = MPI_REQUEST_NULL;
    };
    // Ours, until the target has answered.
    struct Write {
        std::uint64_t peer = 0;
        std::unique_ptr<Shape> shape;
        MPI_Request request = MPI_REQUEST_NULL;
        bool answered = false;
        // The peer is dead, and this was reported.
        bool abandoned = false;
        std::string error;
    };
    // The other's, until all of it is here.
    struct Arrival {
        std::uint64_t post = 0;
        std::unique_ptr<Shape> shape;
        MPI_Request request = MPI_REQUEST_NULL;
        // Where it goes if it is not wanted.
        std::vector<std::uint8_t> discarded;
        std::string refusal;
    };
    struct Ended {
        std::uint64_t post;
        kvferry_status status;
        std::string error;
    };

    using Clock = std::chrono::steady_clock;

    void require_peer(std::uint64_t peer) const;
    // Why nothing more will come from the other process, if that is so.
    std::string why_silent() const;
    void send(const Message &message);
    void advance();
    void receive_letters();
    void read(const Message &message);
    void expect(const Message &message);
    void advance_arrivals();
    void advance_writes();
    // Whether the request is over; `error` tells what went wrong. Never blocks.
    bool is_over(MPI_Request &request, std::string &error);
    void part();
    // Whether nothing has moved for a while although something should.
    bool is_quiet() const;

    const std::chrono::seconds farewell_;
    World world_;
    // The other process is gone.
    bool gone_ = false;
    // It has said that it goes, and when.
    std::optional<Clock::time_point> goodbye_;
    Clock::time_point last_event_ = Clock::now();
    std::uint64_t last_ = 0;
    std::int32_t last_tag_ = 0;
    std::map<std::uint64_t, kvferry_region> registrations_;
    RegionTable memory_;
    // All name the one other process; a name that was disconnected is not taken again.
    std::set<std::uint64_t> peers_;
    std::map<std::uint64_t, Write> writes_;
    std::list<Letter> outgoing_;
    std::list<Letter> incoming_;
    std::list<Arrival> arrivals_;
    std::deque<Ended> ended_;
    std::deque<std::vector<std::uint8_t>> notices_;
};

}  // namespace kvferry::mpi
