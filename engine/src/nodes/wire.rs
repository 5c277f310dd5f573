//! Operations and replies between nodes, as bytes: a tag, then numbers of 32 bits, little-endian; a list is
//! its length and its elements. Both ends are of one release ([`crate::Nodes`]).

use std::io;
use std::sync::Arc;

use cpu_kernels::{KvSlot, TokenCopy};

use crate::forward_batch::{OwnedRows, ReservedRows};
use crate::rank_group::Command;

// Tags of operations. `Command::Pin` has none: each process pins its own threads.
const GROW_KV: u8 = 1;
const COPY_BLOCK: u8 = 2;
const COPY_TOKENS: u8 = 3;
const FORWARD: u8 = 4;

const DONE: u8 = 0;
const FAILED: u8 = 1;

/// What the leader asks of the other nodes: the functions of [`crate::rank::Runner`].
#[derive(Debug)]
pub(super) enum Operation<'a> {
    GrowKv(u32),
    CopyBlock(u32, u32),
    CopyTokens(&'a [TokenCopy]),
    Forward(&'a [ReservedRows<'a>]),
}

/// Appends an operation to `out`.
pub(super) fn write_operation(operation: &Operation<'_>, out: &mut Vec<u8>) {
    match *operation {
        Operation::GrowKv(num_blocks) => {
            out.push(GROW_KV);
            write(out, [num_blocks]);
        }
        Operation::CopyBlock(from, to) => {
            out.push(COPY_BLOCK);
            write(out, [from, to]);
        }
        Operation::CopyTokens(copies) => {
            out.push(COPY_TOKENS);
            write(out, [number(copies.len())]);
            for TokenCopy { from, to } in copies {
                write(out, [from.block, from.offset, to.block, to.offset]);
            }
        }
        Operation::Forward(batch) => {
            out.push(FORWARD);
            write(out, [number(batch.len())]);
            for rows in batch {
                let ReservedRows { token_ids, start, block_table, num_logits, tree } = *rows;
                write(out, [start, number(num_logits), number(tree.num_stored)]);
                for list in [token_ids, block_table, tree.parents] {
                    write(out, [number(list.len())]);
                    write(out, list.iter().copied());
                }
            }
        }
    }
}

/// Reads an operation. Fails if the bytes are not exactly one.
pub(super) fn read_operation(message: &[u8]) -> io::Result<Command> {
    let (&tag, rest) = message.split_first().ok_or_else(malformed)?;
    let mut input = Input(rest);
    let command = match tag {
        GROW_KV => Command::GrowKv(input.number()?),
        COPY_BLOCK => Command::CopyBlock(input.number()?, input.number()?),
        COPY_TOKENS => {
            let numbers = input.numbers_of(4)?;
            let slot = |numbers: &[u32]| KvSlot { block: numbers[0], offset: numbers[1] };
            let copies =
                numbers.chunks_exact(4).map(|n| TokenCopy { from: slot(&n[..2]), to: slot(&n[2..]) });
            Command::CopyTokens(copies.collect())
        }
        FORWARD => {
            let mut batch = Vec::new();
            for _ in 0..input.number()? {
                let (start, num_logits, num_stored) = (input.number()?, input.number()?, input.number()?);
                let (token_ids, block_table, parents) =
                    (input.numbers_of(1)?, input.numbers_of(1)?, input.numbers_of(1)?);
                let (num_logits, num_stored) = (num_logits as usize, num_stored as usize);
                batch.push(OwnedRows { token_ids, start, block_table, num_logits, num_stored, parents });
            }
            // The draws are made where the logits are, by the leader's first rank.
            Command::Forward(Arc::new((batch, Arc::default())))
        }
        _ => return Err(malformed()),
    };
    if input.0.is_empty() { Ok(command) } else { Err(malformed()) }
}

/// Puts the reply to an operation into `out`.
pub(super) fn write_reply(reply: Result<(), String>, out: &mut Vec<u8>) {
    out.clear();
    match reply {
        Ok(()) => out.push(DONE),
        Err(reason) => {
            out.push(FAILED);
            out.extend_from_slice(reason.as_bytes());
        }
    }
}

/// Reads the reply to an operation: done, or why it failed.
pub(super) fn read_reply(message: &[u8]) -> io::Result<Result<(), String>> {
    match message.split_first() {
        Some((&DONE, [])) => Ok(Ok(())),
        Some((&FAILED, reason)) => Ok(Err(String::from_utf8_lossy(reason).into_owned())),
        _ => Err(malformed()),
    }
}

fn write(out: &mut Vec<u8>, numbers: impl IntoIterator<Item = u32>) {
    numbers.into_iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
}

fn number(len: usize) -> u32 {
    u32::try_from(len).expect("a batch's lists are far shorter than 2^32")
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a message is malformed: are all nodes of one release?")
}

/// Bytes that are not read yet.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn number(&mut self) -> io::Result<u32> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or_else(malformed)?;
        self.0 = rest;
        Ok(u32::from_le_bytes(*bytes))
    }

    /// A list of elements of `width` numbers each.
    fn numbers_of(&mut self, width: usize) -> io::Result<Vec<u32>> {
        let len = self.number()? as usize * width;
        let (bytes, rest) = self.0.split_at_checked(len * size_of::<u32>()).ok_or_else(malformed)?;
        self.0 = rest;
        let (numbers, _) = bytes.as_chunks();
        Ok(numbers.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forward_batch::TreePart;

    fn written(operation: &Operation<'_>) -> Vec<u8> {
        let mut message = Vec::new();
        write_operation(operation, &mut message);
        message
    }

    #[test]
    fn operations_arrive_as_they_were_sent_and_no_other_bytes_are_one() {
        let slot = |block, offset| KvSlot { block, offset };
        let copies =
            [TokenCopy { from: slot(7, 3), to: slot(7, 1) }, TokenCopy { from: slot(9, 0), to: slot(7, 2) }];
        let tree = TreePart { num_stored: 1, parents: &[0, 1, 1] };
        let rows = |token_ids, tree| ReservedRows {
            token_ids,
            start: 40,
            block_table: &[4, 2, 8],
            num_logits: 2,
            tree,
        };
        let batch = [rows(&[5, 6][..], tree), rows(&[u32::MAX][..], TreePart::default())];
        let owned = |rows: &ReservedRows<'_>| OwnedRows {
            token_ids: rows.token_ids.to_vec(),
            start: rows.start,
            block_table: rows.block_table.to_vec(),
            num_logits: rows.num_logits,
            num_stored: rows.tree.num_stored,
            parents: rows.tree.parents.to_vec(),
        };
        for (sent, received) in [
            (Operation::GrowKv(3), Command::GrowKv(3)),
            (Operation::CopyBlock(1, 2), Command::CopyBlock(1, 2)),
            (Operation::CopyTokens(&copies), Command::CopyTokens(Arc::new(copies))),
            (Operation::CopyTokens(&[]), Command::CopyTokens(Arc::default())),
            (
                Operation::Forward(&batch),
                Command::Forward(Arc::new((batch.iter().map(owned).collect(), Arc::default()))),
            ),
        ] {
            let mut message = written(&sent);
            assert_eq!(read_operation(&message).unwrap(), received);
            for len in 0..message.len() {
                assert!(read_operation(&message[..len]).is_err(), "{len} of {} bytes", message.len());
            }
            message.push(0);
            assert!(read_operation(&message).is_err(), "a byte more");
        }
        assert!(read_operation(&[99]).is_err());
        // A length that the message does not have.
        assert!(read_operation(&[&[COPY_TOKENS][..], &[0xff; 4]].concat()).is_err());
    }

    #[test]
    fn replies_arrive_as_they_were_sent() {
        for reply in [Ok(()), Err("out of memory".to_owned())] {
            let mut message = vec![1, 2, 3];
            write_reply(reply.clone(), &mut message);
            assert_eq!(read_reply(&message).unwrap(), reply);
        }
        for bytes in [&[][..], &[DONE, 0], &[9]] {
            assert!(read_reply(bytes).is_err());
        }
    }
}
