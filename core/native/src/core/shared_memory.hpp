// Memory that two processes of one host see: a peer's registered regions, mapped here, so that a write is a copy.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "file_descriptor.hpp"
#include "transport.hpp"

namespace kvferry {

// The file behind a region of this process, as a peer of the same host asks for it.
struct Backing {
    // In the owner's table of descriptors.
    std::int32_t fd = -1;
    std::uint64_t device = 0;
    std::uint64_t inode = 0;
    // Of the region's first byte.
    std::uint64_t offset = 0;
};

// Nothing if the region is no shared mapping of a file that this process holds open and nobody can shrink: a peer that
// copies to a file which got shorter would be killed.
std::optional<Backing> find_backing(const Region &region);

// A peer's regions, as far as they could be mapped here.
class MappedRegions {
public:
    // `process`: the peer's pidfd. A region that may not be mapped is left to the transport.
    void map(const FileDescriptor &process, const Region &region, const Backing &backing);

    bool empty() const { return mappings_.empty(); }
    // Where the peer's bytes are here; null if one of our mappings does not hold all of them.
    void *find(std::uint64_t address, std::uint64_t nbytes) const;

private:
    class Mapping {
    public:
        Mapping(const Region &region, void *memory, std::uint64_t nbytes, std::uint64_t skip)
            : region_(region), memory_(memory), nbytes_(nbytes), skip_(skip) {}
        Mapping(Mapping &&other) noexcept
            : region_(other.region_), memory_(std::exchange(other.memory_, nullptr)), nbytes_(other.nbytes_),
              skip_(other.skip_) {}
        Mapping &operator=(Mapping &&) = delete;
        ~Mapping();
        void *find(std::uint64_t address, std::uint64_t nbytes) const;

    private:
        Region region_;
        void *memory_;
        std::uint64_t nbytes_;
        // From the mapping's start, which is a page's, to the region's.
        std::uint64_t skip_;
    };

    std::vector<Mapping> mappings_;
};

// Copy past the caches, since whoever reads it next sits on another core: a memcpy would first read what it overwrites.
// The bytes are visible to every thread that learns of the copy's end.
void stream(void *to, const void *from, std::size_t nbytes);

}  // namespace kvferry
