from faults.harness import ROLES, Cast, compare_each, over_tcp


def test_the_bytes_are_there_whenever_a_hand_off_is_said_to_be_complete(cast: Cast) -> None:
    compare_each(cast, *(cast.start(role, blocks=64, kv_transfer_checksum=False) for role in ROLES))


@over_tcp
def test_the_bytes_are_out_of_the_socket_whenever_a_hand_off_is_said_to_be_complete(cast: Cast) -> None:
    compare_each(cast, *(cast.start(role, blocks=64, kv_transfer_checksum=False) for role in ROLES))
