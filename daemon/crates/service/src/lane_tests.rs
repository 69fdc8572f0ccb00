//! Turns in a lane, in the order in which places are given back.

use super::*;

const A: Peer = Peer::User(1);
const B: Peer = Peer::User(2);
const C: Peer = Peer::User(3);

/// Enters once the calls before it have entered, and says who has a place.
struct Calls {
    lane: Arc<Lane>,
    given: tokio::sync::mpsc::UnboundedReceiver<(Peer, Place)>,
    giver: tokio::sync::mpsc::UnboundedSender<(Peer, Place)>,
    full: Arc<Mutex<Vec<Peer>>>,
}

impl Calls {
    fn new(places: usize, waiting_max: usize) -> Self {
        let (giver, given) = tokio::sync::mpsc::unbounded_channel();
        Self {
            lane: Lane::new(places, waiting_max),
            given,
            giver,
            full: Arc::default(),
        }
    }

    async fn enter(&self, peer: Peer) -> tokio::task::JoinHandle<()> {
        let (lane, giver, full) = (
            Arc::clone(&self.lane),
            self.giver.clone(),
            Arc::clone(&self.full),
        );
        let call = tokio::spawn(async move {
            match lane.enter(peer).await {
                Ok(place) => _ = giver.send((peer, place)),
                Err(Full) => full.lock().unwrap().push(peer),
            }
        });
        settle().await;
        call
    }

    /// The places that were given since.
    async fn given(&mut self) -> Vec<(Peer, Place)> {
        settle().await;
        std::iter::from_fn(|| self.given.try_recv().ok()).collect()
    }
}

/// Lets all other tasks of this thread come to where they wait.
async fn settle() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

fn peers(given: &[(Peer, Place)]) -> Vec<Peer> {
    given.iter().map(|(peer, _)| *peer).collect()
}

#[tokio::test]
async fn one_client_leaves_a_place_to_whoever_comes() {
    let mut calls = Calls::new(4, 100);
    for _ in 0..40 {
        calls.enter(A).await;
    }
    let held = calls.given().await;
    assert_eq!(peers(&held), [A; 3]);
    calls.enter(B).await;
    let of_b = calls.given().await;
    assert_eq!(peers(&of_b), [B]);
    // A's next one does not take what B gives back, so that there is a place for B's next.
    drop(of_b);
    assert_eq!(peers(&calls.given().await), []);
    calls.enter(B).await;
    assert_eq!(peers(&calls.given().await), [B]);
}

#[tokio::test]
async fn clients_take_turns() {
    let mut calls = Calls::new(2, 100);
    for peer in [A, A, A, A, B, B, B, C] {
        calls.enter(peer).await;
    }
    let (mut held, mut order) = (Vec::new(), Vec::new());
    loop {
        let given = calls.given().await;
        order.extend(peers(&given));
        held.extend(given);
        if held.is_empty() {
            break;
        }
        drop(held.remove(0));
    }
    assert_eq!(order, [A, B, C, A, B, A, B, A]);
}

#[tokio::test]
async fn who_waits_no_more_is_out_of_the_queue() {
    let mut calls = Calls::new(2, 100);
    calls.enter(A).await;
    let held = calls.given().await;
    let waits = calls.enter(A).await;
    calls.enter(A).await;
    waits.abort();
    settle().await;
    assert_eq!(calls.lane.state().waiting, 1);
    drop(held);
    let held = calls.given().await;
    assert_eq!(peers(&held), [A]);
    drop(held);
    let state = calls.lane.state();
    assert_eq!((state.running, state.waiting), (0, 0));
    assert!(state.clients.is_empty(), "{state:?}");
}

#[tokio::test]
async fn a_full_lane_refuses_the_newest_of_who_waits_with_most() {
    let mut calls = Calls::new(2, 4);
    for _ in 0..6 {
        calls.enter(A).await;
    }
    assert_eq!(*calls.full.lock().unwrap(), [A], "one runs, four wait");
    let held = calls.given().await;
    for _ in 0..4 {
        calls.enter(B).await;
    }
    // The first ran at once; two more wait like two of A.
    assert_eq!(*calls.full.lock().unwrap(), [A, A, A, B]);
    assert_eq!(
        (peers(&held), peers(&calls.given().await)),
        (vec![A], vec![B])
    );
}
