// Scattered memory as MPI sees it: one run of bytes, or a datatype that names them all.
#pragma once

#include <climits>
#include <utility>
#include <vector>

#include "status.hpp"

namespace kvferry::mpi {

struct Run {
    std::uint64_t address;
    std::uint64_t nbytes;
};

class Shape {
public:
    // Runs that follow each other become one: a single run needs no gathering, and MPI copies it once.
    explicit Shape(const std::vector<Run> &runs) {
        std::vector<MPI_Aint> addresses;
        std::vector<int> sizes;
        for (const Run &run : runs) {
            for (std::uint64_t done = 0; done < run.nbytes;) {
                const std::uint64_t here = std::min<std::uint64_t>(run.nbytes - done, kLongest);
                const auto address = static_cast<MPI_Aint>(run.address + done);
                const bool follows = !addresses.empty() && addresses.back() + sizes.back() == address;
                if (follows && sizes.back() + here <= kLongest) {
                    sizes.back() += static_cast<int>(here);
                } else {
                    addresses.push_back(address);
                    sizes.push_back(static_cast<int>(here));
                }
                done += here;
            }
        }
        if (addresses.size() == 1) {
            base_ = reinterpret_cast<void *>(addresses.front());
            count_ = sizes.front();
            return;
        }
        require(MPI_Type_create_hindexed(static_cast<int>(sizes.size()), sizes.data(), addresses.data(), MPI_BYTE,
                                         &type_),
                "MPI makes no datatype");
        const int code = MPI_Type_commit(&type_);
        if (code != MPI_SUCCESS) MPI_Type_free(&type_);
        require(code, "MPI makes no datatype");
    }
    ~Shape() {
        if (type_ != MPI_BYTE) MPI_Type_free(&type_);
    }
    Shape(const Shape &) = delete;

    void *base() const { return base_; }
    int count() const { return count_; }
    MPI_Datatype type() const { return type_; }

private:
    static constexpr std::uint64_t kLongest = 1u << 30;

    void *base_ = MPI_BOTTOM;
    int count_ = 1;
    MPI_Datatype type_ = MPI_BYTE;
};

}  // namespace kvferry::mpi
