// Threads that help the lanes to copy into memory that is mapped here. They have no transport, and sleep until a
// transfer has more pieces than one thread should copy.
#pragma once

#include <thread>
#include <vector>

#include "transfers.hpp"

namespace kvferry {

// Write a piece's segments to where their destinations are mapped here. Returns what is wrong, or nothing.
std::string copy(const Piece &piece);

class Copiers {
public:
    // `book` outlives them.
    explicit Copiers(TransferBook &book) : book_(book) {}
    ~Copiers();
    Copiers(const Copiers &) = delete;

    // Have so many threads; those that there are stay.
    void start(std::size_t count);

private:
    void run();

    TransferBook &book_;
    std::vector<std::thread> threads_;
};

}  // namespace kvferry
