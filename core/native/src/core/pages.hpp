// Memory of our own for a transport to read from or write to.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <memory>
#include <string>

#include "error.hpp"

namespace kvferry {

class Pages {
public:
    // Takes no memory before it is touched. Raises KVFERRY_NO_MEMORY if there is no such buffer to be had.
    explicit Pages(std::uint64_t nbytes) : memory_(map(nbytes), Unmap{nbytes}) {}

    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(memory_.get()); }

private:
    struct Unmap {
        std::uint64_t nbytes;
        void operator()(void *memory) const { ::munmap(memory, nbytes); }
    };

    static void *map(std::uint64_t nbytes) {
        void *memory = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            throw Error(KVFERRY_NO_MEMORY,
                        "a staging buffer of " + std::to_string(nbytes) + " bytes does not fit memory");
        }
        // Fewer pages to pin for every write that leaves from here.
        ::madvise(memory, nbytes, MADV_HUGEPAGE);
        return memory;
    }

    std::unique_ptr<void, Unmap> memory_;
};

}  // namespace kvferry
