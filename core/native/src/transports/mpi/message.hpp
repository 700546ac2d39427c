// The short messages between two agents, beside the data itself.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../../core/byte_stream.hpp"
#include "shape.hpp"

namespace kvferry::mpi {

enum class Kind : std::uint8_t {
    kWrite = 1,   // the data that comes with `tag` goes to `runs`
    kWritten,     // answer to it: all of it is there, or why not
    kNotice,      // for the core
    kGoodbye,     // nothing more comes, and nothing more is taken
};

struct Message {
    Kind kind{};
    std::uint64_t post = 0;
    std::int32_t tag = 0;
    std::vector<Run> runs;
    // kWritten: empty = fine. kNotice: the notice.
    std::vector<std::uint8_t> body;
};

inline std::vector<std::uint8_t> encode(const Message &message) {
    ByteWriter out;
    out.number(static_cast<std::uint8_t>(message.kind));
    out.number(message.post);
    out.number(message.tag);
    out.number(static_cast<std::uint32_t>(message.runs.size()));
    for (const Run &run : message.runs) {
        out.number(run.address);
        out.number(run.nbytes);
    }
    out.bytes(message.body);
    return out.take();
}

inline Message decode(std::span<const std::uint8_t> bytes) {
    ByteReader in(bytes);
    Message message;
    message.kind = static_cast<Kind>(in.number<std::uint8_t>());
    message.post = in.number<std::uint64_t>();
    message.tag = in.number<std::int32_t>();
    message.runs.resize(in.count(sizeof(Run)));
    for (Run &run : message.runs) {
        run.address = in.number<std::uint64_t>();
        run.nbytes = in.number<std::uint64_t>();
    }
    const auto body = in.bytes();
    message.body.assign(body.begin(), body.end());
    in.end();
    return message;
}

}  // namespace kvferry::mpi
