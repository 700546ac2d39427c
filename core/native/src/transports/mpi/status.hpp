// What MPI calls return, as the ABI's statuses and exceptions.
#pragma once

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
// Needs the above.
#include <mpi-ext.h>

#include <string>

#include "../../core/error.hpp"

namespace kvferry::mpi {

inline const char *kPeerGone = "the other worker of this MPI world is gone, and no other can join it: restart both";

inline bool says_gone(int code) {
    int kind = MPI_SUCCESS;
    MPI_Error_class(code, &kind);
    return kind == MPIX_ERR_PROC_FAILED || kind == MPIX_ERR_PROC_FAILED_PENDING || kind == MPIX_ERR_REVOKED;
}

inline std::string describe(int code) {
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(code, text, &length);
    return {text, static_cast<std::size_t>(length)};
}

inline void require(int code, const char *what) {
    if (code == MPI_SUCCESS) return;
    if (says_gone(code)) throw Error(KVFERRY_UNREACHABLE, kPeerGone);
    throw Error(KVFERRY_INTERNAL, std::string(what) + ": " + describe(code));
}

}  // namespace kvferry::mpi
