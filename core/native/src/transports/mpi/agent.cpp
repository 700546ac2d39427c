#include "agent.hpp"

#include <sched.h>

#include <thread>

namespace kvferry::mpi {

namespace {

constexpr int kLetterTag = 1;
constexpr std::int32_t kFirstDataTag = 2;
constexpr std::int32_t kLastDataTag = 1 << 20;
constexpr unsigned kLettersAtOnce = 16;
constexpr std::chrono::seconds kFarewellTogether{10};
// A lane asks without a pause: a peer that is slow, or stopped, must not cost a core.
constexpr std::chrono::milliseconds kPatience{10};
constexpr std::chrono::microseconds kNap{50};

std::chrono::seconds seconds(const OptionMap &options, const char *key, const char *otherwise) {
    const auto found = options.find(key);
    const std::string text = found == options.end() ? otherwise : found->second;
    try {
        std::size_t used = 0;
        const int value = std::stoi(text, &used);
        if (used == text.size() && value > 0) return std::chrono::seconds(value);
    } catch (const std::exception &) {
    }
    throw Error(KVFERRY_INVALID, std::string(key) + " is a number of whole seconds, not " + text);
}

const OptionMap &known(const OptionMap &options) {
    reject_unknown(options, {"start_seconds", "end_seconds"});
    return options;
}

}  // namespace

MpiAgent::MpiAgent(const OptionMap &options)
    : farewell_(seconds(known(options), "end_seconds", "1")), world_(seconds(options, "start_seconds", "600")) {}

MpiAgent::~MpiAgent() {
    try {
        part();
    } catch (const std::exception &) {
        // The process's end does what is left.
    }
}

// Leaving is collective: it hangs on one who stays. So both say that they go, and whoever has not heard it from the
// other in time goes without.
void MpiAgent::part() {
    // Where no failure is tolerated, a process that ends without leaving takes the other with it.
    const auto patience = world_.tolerates_failures() ? farewell_ : kFarewellTogether;
    const auto deadline = Clock::now() + patience;
    if (!gone_) send({Kind::kGoodbye, 0, 0, {}, {}});
    while (!gone_ && !(goodbye_ && outgoing_.empty())) {
        if (Clock::now() > deadline) return;
        advance();
        ::sched_yield();
    }
    world_.leave(farewell_);
}

std::uint64_t MpiAgent::register_memory(const kvferry_region &region) {
    if (region.device_kind != KVFERRY_CPU) throw Error(KVFERRY_INVALID, "MPI moves host memory only");
    memory_.add(region);
    registrations_.emplace(++last_, region);
    return last_;
}

void MpiAgent::deregister_memory(std::uint64_t registration) {
    const auto found = registrations_.find(registration);
    if (found == registrations_.end()) throw Error(KVFERRY_INVALID, "MPI holds no such registration");
    memory_.remove(found->second);
    registrations_.erase(found);
}

// --- the peer ---------------------------------------------------------------------------------------------------

std::vector<std::uint8_t> MpiAgent::describe() const {
    ByteWriter out;
    out.number(world_.id());
    out.number(static_cast<std::int32_t>(world_.rank()));
    return out.take();
}

std::uint64_t MpiAgent::connect(std::span<const std::uint8_t> descriptor) {
    ByteReader in(descriptor);
    const auto id = in.number<World::Id>();
    const auto rank = in.number<std::int32_t>();
    in.end();
    if (id != world_.id()) {
        throw Error(KVFERRY_INVALID, "the peer is in another MPI world: one mpiexec must start both workers");
    }
    if (rank != world_.other()) {
        throw Error(KVFERRY_INVALID, "the peer says that it is rank " + std::to_string(rank) +
                                         " of this MPI world; this process is rank " + std::to_string(world_.rank()));
    }
    advance();
    if (const auto why = why_silent(); !why.empty()) throw Error(KVFERRY_UNREACHABLE, why);
    peers_.insert(++last_);
    return last_;
}

void MpiAgent::disconnect(std::uint64_t peer, bool dead) {
    if (peers_.erase(peer) == 0 || !dead) return;
    gone_ = true;
    for (auto &[post, write] : writes_) {
        if (write.peer != peer || write.abandoned) continue;
        write.abandoned = true;
        ended_.push_back({post, KVFERRY_CANCELLED, "taken back"});
    }
}

void MpiAgent::require_peer(std::uint64_t peer) const {
    if (!peers_.contains(peer)) throw Error(KVFERRY_INVALID, "MPI has no such peer");
    if (const auto why = why_silent(); !why.empty()) throw Error(KVFERRY_UNREACHABLE, why);
}

std::string MpiAgent::why_silent() const {
    if (gone_) return kPeerGone;
    return goodbye_ ? "the other worker of this MPI world has closed its agent" : "";
}

// --- the writer -------------------------------------------------------------------------------------------------

kvferry_status MpiAgent::post(std::uint64_t peer, std::uint64_t post, std::span<const kvferry_segment> segments) {
    require_peer(peer);
    std::vector<Run> ours;
    last_tag_ = last_tag_ < kLastDataTag ? std::max(last_tag_ + 1, kFirstDataTag) : kFirstDataTag;
    Message message{Kind::kWrite, post, last_tag_, {}, {}};
    for (const auto &segment : segments) {
        ours.push_back({segment.src, segment.nbytes});
        message.runs.push_back({segment.dst, segment.nbytes});
    }
    last_event_ = Clock::now();
    Write write;
    write.peer = peer;
    write.shape = std::make_unique<Shape>(ours);
    send(message);
    const int code = MPI_Isend(write.shape->base(), write.shape->count(), write.shape->type(), world_.other(),
                               message.tag, MPI_COMM_WORLD, &write.request);
    // The target waits for it by now: this is a failed write, not a failed call.
    if (code != MPI_SUCCESS) {
        write.answered = true;
        write.error = says_gone(code) ? kPeerGone : "MPI does not send: " + mpi::describe(code);
    }
    writes_.emplace(post, std::move(write));
    return KVFERRY_OK;
}

void MpiAgent::advance_writes() {
    // Whoever goes still answers what has come by then.
    const bool silent = gone_ || (goodbye_ && Clock::now() > *goodbye_ + 2 * farewell_);
    for (auto each = writes_.begin(); each != writes_.end();) {
        Write &write = each->second;
        const bool sent = is_over(write.request, write.error);
        if (!write.answered && write.error.empty() && silent) write.error = why_silent();
        if (write.error.empty() && !(sent && write.answered)) {
            ++each;
            continue;
        }
        if (!write.abandoned) {
            const auto status = write.error.empty() ? KVFERRY_OK : silent ? KVFERRY_UNREACHABLE : KVFERRY_INTERNAL;
            ended_.push_back({each->first, status, write.error});
        }
        if (!sent) MPI_Request_free(&write.request);
        each = writes_.erase(each);
    }
}

// --- the target -------------------------------------------------------------------------------------------------

void MpiAgent::expect(const Message &message) {
    Arrival arrival;
    arrival.post = message.post;
    std::uint64_t nbytes = 0;
    for (const Run &run : message.runs) {
        nbytes += run.nbytes;
        if (!memory_.covers(run.address, run.nbytes)) arrival.refusal = "the target has not registered that memory";
    }
    std::vector<Run> runs = message.runs;
    if (!arrival.refusal.empty()) {
        arrival.discarded.resize(nbytes);
        runs = {{reinterpret_cast<std::uint64_t>(arrival.discarded.data()), nbytes}};
    }
    arrival.shape = std::make_unique<Shape>(runs);
    require(MPI_Irecv(arrival.shape->base(), arrival.shape->count(), arrival.shape->type(), world_.other(), message.tag,
                      MPI_COMM_WORLD, &arrival.request),
            "MPI does not receive");
    arrivals_.push_back(std::move(arrival));
}

void MpiAgent::advance_arrivals() {
    for (auto each = arrivals_.begin(); each != arrivals_.end();) {
        std::string error = each->refusal;
        if (!is_over(each->request, error)) {
            ++each;
            continue;
        }
        if (!gone_) send({Kind::kWritten, each->post, 0, {}, {error.begin(), error.end()}});
        each = arrivals_.erase(each);
    }
}

// --- letters ----------------------------------------------------------------------------------------------------

void MpiAgent::send(const Message &message) {
    Letter &letter = outgoing_.emplace_back(Letter{encode(message), MPI_REQUEST_NULL});
    const int code = MPI_Isend(letter.bytes.data(), static_cast<int>(letter.bytes.size()), MPI_BYTE, world_.other(),
                               kLetterTag, MPI_COMM_WORLD, &letter.request);
    if (code == MPI_SUCCESS) return;
    outgoing_.pop_back();
    gone_ |= says_gone(code);
    require(code, "MPI does not send");
}

void MpiAgent::receive_letters() {
    for (unsigned count = 0; count < kLettersAtOnce; ++count) {
        int found = 0;
        MPI_Message handle = MPI_MESSAGE_NULL;
        MPI_Status status;
        const int code = MPI_Improbe(world_.other(), kLetterTag, MPI_COMM_WORLD, &found, &handle, &status);
        gone_ |= code != MPI_SUCCESS && says_gone(code);
        if (code != MPI_SUCCESS || found == 0) break;
        int nbytes = 0;
        MPI_Get_count(&status, MPI_BYTE, &nbytes);
        Letter &letter = incoming_.emplace_back(Letter{std::vector<std::uint8_t>(static_cast<std::size_t>(nbytes)), {}});
        require(MPI_Imrecv(letter.bytes.data(), nbytes, MPI_BYTE, &handle, &letter.request), "MPI does not receive");
    }
    // In order: a notice must not overtake the write that it speaks of.
    while (!incoming_.empty()) {
        std::string error;
        if (!is_over(incoming_.front().request, error)) return;
        const Letter letter = std::move(incoming_.front());
        incoming_.pop_front();
        if (error.empty()) read(decode(letter.bytes));
    }
}

void MpiAgent::read(const Message &message) {
    switch (message.kind) {
        case Kind::kWrite:
            expect(message);
            return;
        case Kind::kWritten:
            if (const auto found = writes_.find(message.post); found != writes_.end()) {
                found->second.answered = true;
                found->second.error.assign(message.body.begin(), message.body.end());
            }
            return;
        case Kind::kNotice:
            notices_.push_back(message.body);
            return;
        case Kind::kGoodbye:
            goodbye_ = Clock::now();
            return;
    }
}

void MpiAgent::notify(std::uint64_t peer, std::span<const std::uint8_t> message) {
    require_peer(peer);
    send({Kind::kNotice, 0, 0, {}, {message.begin(), message.end()}});
}

// --- progress ---------------------------------------------------------------------------------------------------

bool MpiAgent::is_over(MPI_Request &request, std::string &error) {
    if (request == MPI_REQUEST_NULL) return true;
    int done = 0;
    const int code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (code == MPI_SUCCESS) {
        if (done != 0) last_event_ = Clock::now();
        return done != 0;
    }
    gone_ |= says_gone(code);
    error = says_gone(code) ? kPeerGone : mpi::describe(code);
    request = MPI_REQUEST_NULL;
    return true;
}

void MpiAgent::advance() {
    receive_letters();
    advance_arrivals();
    outgoing_.remove_if([this](Letter &letter) {
        std::string error;
        return is_over(letter.request, error);
    });
    advance_writes();
}

bool MpiAgent::is_quiet() const { return ended_.empty() && Clock::now() - last_event_ > kPatience; }

std::size_t MpiAgent::progress(std::span<kvferry_completion> completions) {
    advance();
    if (is_quiet()) std::this_thread::sleep_for(kNap);
    std::size_t count = 0;
    for (; count < completions.size() && !ended_.empty(); ++count) {
        completions[count].post = ended_.front().post;
        completions[count].status = ended_.front().status;
        copy_text(completions[count].error, ended_.front().error);
        ended_.pop_front();
    }
    return count;
}

}  // namespace kvferry::mpi
