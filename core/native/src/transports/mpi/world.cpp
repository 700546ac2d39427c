#include "world.hpp"

#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <thread>

namespace kvferry::mpi {

namespace {

using Clock = std::chrono::steady_clock;

const char *kHowToStart =
    "start both workers with one command: "
    "mpiexec --with-ft ulfm -n 1 kvferry worker --role context … : -n 1 kvferry worker --role generation …";

// MPI can be started once in a process's life.
std::atomic<bool> entered{false};

std::string variable(const char *name) {
    const char *value = std::getenv(name);
    return value == nullptr ? "" : value;
}

// Before MPI starts: alone, it would make a world of its own, and wait for nobody.
void require_two() {
    const std::string size = variable("OMPI_COMM_WORLD_SIZE");
    if (size.empty() || variable("PMIX_NAMESPACE").empty()) {
        throw Error(KVFERRY_UNAVAILABLE, std::string("this process is in no MPI world; ") + kHowToStart);
    }
    if (size != "2") {
        throw Error(KVFERRY_UNAVAILABLE, "this MPI world has " + size +
                                             (size == "1" ? " process" : " processes") +
                                             ", not one context and one generation worker; " + kHowToStart);
    }
}

// Run what may never return on a thread of its own; false if it did not return in time, and the thread is left behind.
template <typename Call>
bool returns_within(std::chrono::seconds patience, Call call) {
    auto done = std::make_shared<std::promise<void>>();
    auto result = done->get_future();
    std::thread thread([call, done] {
        call();
        done->set_value();
    });
    if (result.wait_for(patience) == std::future_status::ready) {
        thread.join();
        return true;
    }
    thread.detach();
    return false;
}

void enter(std::chrono::seconds patience) {
    if (entered.exchange(true)) {
        throw Error(KVFERRY_UNAVAILABLE,
                    "this process has had its MPI agent: MPI starts once in a process, for one agent of one lane");
    }
    int already = 0;
    MPI_Initialized(&already);
    if (already != 0) throw Error(KVFERRY_UNAVAILABLE, "somebody else has started MPI in this process");
    auto outcome = std::make_shared<std::atomic<int>>(MPI_SUCCESS);
    // Not FUNNELED: this thread is not the lane's.
    const bool returned = returns_within(patience, [outcome] {
        int provided = 0;
        *outcome = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
    });
    if (!returned) {
        throw Error(KVFERRY_UNAVAILABLE, "the other worker of this MPI world did not start within " +
                                             std::to_string(patience.count()) + " s");
    }
    require(*outcome, "MPI does not start");
}

}  // namespace

World::World(std::chrono::seconds patience) {
    require_two();
    const auto deadline = Clock::now() + patience;
    enter(patience);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    tolerant_ = variable("OMPI_MCA_mpi_ft_enable") == "1";
    agree_on_id(deadline);
}

void World::agree_on_id(Clock::time_point deadline) {
    std::random_device random;
    for (auto &byte : id_) byte = static_cast<std::uint8_t>(random());
    MPI_Request request = MPI_REQUEST_NULL;
    require(MPI_Ibcast(id_.data(), static_cast<int>(id_.size()), MPI_BYTE, 0, MPI_COMM_WORLD, &request),
            "MPI does not broadcast");
    for (int done = 0; done == 0; ::sched_yield()) {
        require(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI does not broadcast");
        if (done == 0 && Clock::now() > deadline) {
            throw Error(KVFERRY_UNAVAILABLE, "the other worker of this MPI world started MPI and went no further");
        }
    }
}

void World::leave(std::chrono::seconds patience) noexcept {
    try {
        returns_within(patience, [] { MPI_Finalize(); });
    } catch (...) {
        // No thread to be had: the end of the process is as good.
    }
}

const char *library_version() {
    static const std::string name = [] {
        char text[MPI_MAX_LIBRARY_VERSION_STRING];
        int length = 0;
        MPI_Get_library_version(text, &length);
        // "Open MPI v5.0.11, package: …"
        const std::string whole(text, static_cast<std::size_t>(length));
        const auto begin = whole.find(" v");
        if (begin == std::string::npos) return whole.substr(0, whole.find(','));
        return "openmpi " + whole.substr(begin + 2, whole.find(',', begin) - begin - 2);
    }();
    return name.c_str();
}

}  // namespace kvferry::mpi
