"""The server's part in a secure sum: the masks taken off, those of members that dropped out included.

Of every member that answered its own seed is put together from shares, of every one that dropped out the key of its
masks: t shares each. See ``agreement`` for the members' part.
"""

from collections.abc import Collection, Mapping

from unskew.core.errors import UserError
from unskew.privacy.agreement import KEY_BYTES, Agreement, mask_private, named, own_mask_key
from unskew.privacy.ciphers import Words, add_stream, public_bytes
from unskew.privacy.shamir import SHARE_BYTES, secret_of, weights_at_zero


def unmask(
    total: Words, agreement: Agreement, sharing: Collection[int], answered: Collection[int],
    opened: Mapping[int, Mapping[int, bytes]],
) -> None:  # fmt: skip
    """Take all masks off the sum of the answers, in place.

    ``opened`` has, by the member that gave them, the shares of every member that shared its secrets.
    """
    if len(opened) < agreement.threshold:
        raise UserError(
            f"{len(opened)} of {len(agreement.members)} clients opened their shares, {agreement.threshold} are needed; "
            "the sum stays masked"
        )
    givers = sorted(opened)[: agreement.threshold]
    places = {giver: agreement.members.index(giver) + 1 for giver in givers}
    weights = dict(zip(places.values(), weights_at_zero(list(places.values())), strict=True))
    for member in sorted(sharing):
        shares = {place: _share(opened, giver, member) for giver, place in places.items()}
        secret = secret_of(shares, weights)
        if member in answered:
            add_stream(total, own_mask_key(secret, agreement.session), -1)
        else:
            _take_off_pairs(total, agreement, member, secret, answered)


def _take_off_pairs(total: Words, agreement: Agreement, member: int, secret: bytes, answered: Collection[int]) -> None:
    """Take off what the others added for a member that dropped out: +m for those before it, −m for those after."""
    private = mask_private(secret, agreement.session)
    if public_bytes(private) != agreement.publics[member][:KEY_BYTES]:
        raise UserError(f"the shares of {named(member)}, which dropped out, do not give its key: one of them is wrong")
    for other in sorted(answered):
        add_stream(total, agreement.mask_key(private, member, other), 1 if other > member else -1)


def _share(opened: Mapping[int, Mapping[int, bytes]], giver: int, member: int) -> bytes:
    share = opened[giver].get(member, b"")
    if len(share) != SHARE_BYTES:
        expected = f"it has {len(share)} bytes, expected {SHARE_BYTES}"
        raise UserError(f"the share of {named(member)} that {named(giver)} opened is refused: {expected}")
    return share
