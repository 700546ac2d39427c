// What the shared object exports.
#include "agent.hpp"

extern "C" __attribute__((visibility("default"))) const kvferry_transport *kvferry_transport_v1(void) {
    static const kvferry_transport table =
        kvferry::Adapter<kvferry::mpi::MpiAgent>::table("mpi", kvferry::mpi::library_version);
    return &table;
}
