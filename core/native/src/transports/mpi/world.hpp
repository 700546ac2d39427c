// The MPI world of this process: entered once, left once, neither without a bound.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>

#include "status.hpp"

namespace kvferry::mpi {

class World {
public:
    using Id = std::array<std::uint8_t, 16>;

    // Raises if this process was not started as one of two, has been in a world before, or if the other one does not
    // come within `patience`.
    explicit World(std::chrono::seconds patience);
    World(const World &) = delete;

    const Id &id() const { return id_; }
    int rank() const { return rank_; }
    int other() const { return 1 - rank_; }
    // Whether the survivor of the two goes on. If not, mpiexec ends it as soon as the other ends.
    bool tolerates_failures() const { return tolerant_; }

    // Leave together with the other, which is known to leave too, or to be gone. Gives up after `patience`: then the
    // process's end does it.
    void leave(std::chrono::seconds patience) noexcept;

private:
    void agree_on_id(std::chrono::steady_clock::time_point deadline);

    Id id_{};
    int rank_ = 0;
    bool tolerant_ = false;
};

// "openmpi 5.0.11"
const char *library_version();

}  // namespace kvferry::mpi
